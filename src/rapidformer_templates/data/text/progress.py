"""A progress bar for work on a corpus, on standard error and only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

REFRESH_SECONDS = 0.2


class Counted(Protocol):
    """What counts documents and tokens."""

    @property
    def tokens(self) -> int: ...

    documents: int


class TextProgress:
    """Bytes of text that are done, with tokens and documents a second. Where nobody is looking it does nothing.

    Args:
        size: bytes in all.
    """

    def __init__(self, size: int) -> None:
        self._bar: Any = None
        self._began = self._shown = time.perf_counter()
        self._pending = 0
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("preprocessing", total=size, speed="")

    def __enter__(self) -> TextProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.update(self._task, advance=self._pending)
            self._bar.stop()

    def advance(self, size: int, sets: Sequence[Counted]) -> None:
        """So many more bytes are done; ``sets`` count what was written since the beginning."""
        if self._bar is None:
            return
        self._pending += size
        now = time.perf_counter()
        if now - self._shown >= REFRESH_SECONDS:
            seconds = now - self._began
            tokens, documents = sum(one.tokens for one in sets), sum(one.documents for one in sets)
            speed = f"{tokens / seconds:,.0f} tokens/s  {documents / seconds:,.0f} documents/s"
            self._bar.update(self._task, advance=self._pending, speed=speed)
            self._pending, self._shown = 0, now


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
