"""Rehearse ``kill -9``: before each call that changes a folder, or in the middle of a write of another process."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "truncate")


def _nothing(descriptor: object) -> None:
    """Replace ``os.fsync``: what a killed process has passed to the system reaches the disk anyway."""


class Killed(BaseException):
    """Simulates ``kill -9``. Nothing catches it, and no cleanup after it has an effect."""


def each_crash(prepare: Callable[[int], Path], body: Callable[[Path], None]) -> Iterator[Path]:
    """Yield the folder that ``body`` leaves after dying before each of its changes in turn, then after a complete run.

    Args:
        prepare: creates the folder of an attempt from the attempt's number.
        body: changes the folder.
    """
    last = 0
    while True:
        folder = prepare(last)
        left = last

        def dying(change: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: object, **named: object) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                change(*arguments, **named)

            return call

        patches = [mock.patch.object(os, name, dying(getattr(os, name))) for name in CHANGES]
        patches.append(mock.patch.object(os, "fsync", dying(_nothing)))
        try:
            for patch in patches:
                patch.start()
            try:
                body(folder)
                died = False
            except Killed:
                died = True
        finally:
            for patch in patches:
                patch.stop()
        yield folder
        if not died:
            assert last > 3, "the body changes nothing: there is nothing to see"
            return
        last += 1


def hang_in_writes(part: str, begun: Callable[[], None]) -> None:
    """Write half of what the first write to a path with this part has, call ``begun``, and wait to be killed."""
    pwrite = os.pwrite

    def hang(descriptor: int, data: memoryview, place: int) -> int:
        if part not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return pwrite(descriptor, data, place)
        pwrite(descriptor, data[: len(data) // 2], place)
        begun()
        time.sleep(600)
        raise AssertionError("nobody killed this process")

    os.pwrite = hang
