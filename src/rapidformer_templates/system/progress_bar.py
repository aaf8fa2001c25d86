"""A progress bar on standard error, only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rapidformer_templates.system.terminal import console

REFRESH_SECONDS = 0.2


class ProgressBar:
    """Shows the progress of some work, followed by a text. Without a terminal it does nothing.

    Args:
        name: name of the work.
        total: total steps or bytes.
        done: steps or bytes that are already done.
        show_count: show numbers instead of per cent.
        show: whether this process shows the bar.
    """

    def __init__(self, name: str, total: int, done: int = 0, *, show_count: bool = True, show: bool = True) -> None:
        self._bar: Any = _bar(show_count) if show and sys.stderr.isatty() else None
        self._pending = 0
        self._shown = time.perf_counter()
        if self._bar:
            self._task = self._bar.add_task(name, total=total, completed=done, text="")

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.update(self._task, advance=self._pending)
            self._bar.stop()

    def advance(self, count: int, text: Callable[[], str]) -> None:
        """Advance by ``count``. ``text`` is called only for display, at most five times per second."""
        if self._bar is None:
            return
        self._pending += count
        now = time.perf_counter()
        if now - self._shown >= REFRESH_SECONDS:
            self._bar.update(self._task, advance=self._pending, text=text())
            self._pending, self._shown = 0, now


def _bar(show_count: bool) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn() if show_count else TaskProgressColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console(on_stderr=True),
    )
