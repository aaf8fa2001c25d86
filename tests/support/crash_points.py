"""kill -9 before each call that changes a folder, rehearsed in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "truncate")


def _nothing(descriptor: object) -> None:
    """What a process that is killed has given to the system is on its way to the disk."""


class Killed(BaseException):
    """Nothing catches it; and from here on nothing that a process cleans up has an effect."""


def each_crash(prepare: Callable[[int], Path], body: Callable[[Path], None]) -> Iterator[Path]:
    """The folder that ``body`` leaves, for a death before each of its changes; at last that of a body that lived.

    Args:
        prepare: makes the folder of an attempt, by its number.
        body: changes it.
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
