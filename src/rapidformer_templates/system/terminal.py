"""Output on the terminal: lines, and consoles and progress bars without markup, because texts contain brackets."""

from __future__ import annotations

import codecs
import io
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from rapidformer_templates.system.workers import Workers

REFRESH_SECONDS = 0.2


def _as_in_json(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("as in JSON", _as_in_json)


def escape_unknown_characters() -> None:
    """Let the standard streams write characters that their encoding lacks as JSON does (``\\u2026``), and not fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="as in JSON")


def console(*, piped_width: int | None = None, on_stderr: bool = False, plain: bool = False) -> Console:
    """Return a console without rich's markup, which would swallow ``[deepspeed]``, and without its emojis.

    Args:
        piped_width: columns of an output that is not a terminal. By default rich uses ``COLUMNS``, or 80.
        on_stderr: print to standard error.
        plain: print text in a notebook as well, where rich shows HTML.
    """
    from rich.console import Console

    terminal = Console(stderr=on_stderr, markup=False, emoji=False, force_jupyter=False if plain else None)
    if piped_width is not None and not terminal.is_terminal:
        terminal.width = piped_width
    return terminal


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
        self._bar = _bar(show_count) if show and sys.stderr.isatty() else None
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


def _bar(show_count: bool) -> Progress:
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


def say(workers: Workers, line: str, *, loud: bool = False) -> None:
    """Print a line from rank 0. Loud lines begin with ``warning:``."""
    if workers.is_main:
        print_lines(f"warning: {line}" if loud else line)


def print_lines(text: str) -> None:
    """Print lines to standard error. Errors are ignored, so that a run continues if nobody reads them."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
