"""A progress bar on standard error, for people: only on rank 0 and only on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from rapidformer_templates.host_copy import HostCopy

REFRESH_SECONDS = 0.2


class Progress:
    """Progress of the training steps. Where nobody is looking it does nothing."""

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        self._bar: Any = None
        self._pending = 0
        self._shown = time.perf_counter()
        self._loss: HostCopy | None = None
        self._text = ""
        if show and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("training", total=total, completed=done, loss="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.update(self._task, advance=self._pending)
            self._bar.stop()

    def advance(self, loss: torch.Tensor) -> None:
        """One more step. The loss is shown at most five times a second, on a GPU a moment late: nobody waits for it."""
        if self._bar is None:
            return
        self._pending += 1
        now = time.perf_counter()
        if now - self._shown >= REFRESH_SECONDS:
            copy = HostCopy(loss.reshape(1))
            for latest in (self._loss, copy):
                if latest is not None and latest.has_arrived:
                    self._text = f"loss {latest.values()[0]:.4f}"
            self._bar.update(self._task, advance=self._pending, loss=self._text)
            self._loss, self._pending, self._shown = copy, 0, now


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
