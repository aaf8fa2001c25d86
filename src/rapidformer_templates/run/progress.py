"""What people see while a run trains, from rank 0 on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates.run.console import tell
from rapidformer_templates.system.host_copy import HostCopy

REFRESH_SECONDS = 0.2


class Progress:
    """Progress of the training steps: on a terminal a bar, else a line for each log, evaluation and checkpoint."""

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        self._bar: Any = None
        self._total = total
        self._pending = 0
        self._shown = time.perf_counter()
        self._loss: HostCopy | None = None
        self._text = ""
        self._in_lines = show and not sys.stderr.isatty()
        if show and not self._in_lines:
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

    def logged(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        skipped = "  skipped" if line["skipped"] else ""
        numbers = f"loss {line['loss']:.4f}  grad norm {line['grad_norm']:.4f}  lr {line['lr']:.3g}"
        self._tell(line["step"], f"{numbers}  {line['samples_per_second']:,.1f} samples/s{skipped}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation."""
        self._tell(step, "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint that is whole."""
        self._tell(step, f"saved {path}")

    def _tell(self, step: int, text: str) -> None:
        if self._in_lines:
            tell(f"step {step:,}/{self._total:,}  {text}")


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
