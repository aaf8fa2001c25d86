"""Progress output on standard error of rank 0: a progress bar on a terminal, otherwise lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates.system.accelerator import HostCopy
from rapidformer_templates.system.terminal import ProgressBar, print_lines


class Progress:
    """Progress of the training steps: a bar on a terminal, otherwise a line per log, evaluation and checkpoint."""

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        self._bar = ProgressBar("training", total, done, show=show)
        self._total = total
        self._loss: HostCopy | None = None
        self._text = ""
        self._in_lines = show and not sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def advance(self, loss: torch.Tensor) -> None:
        """Count one step. The loss is shown up to five times per second, on a GPU with a delay, without a wait."""
        self._bar.advance(1, lambda: self._latest(loss))

    def _latest(self, loss: torch.Tensor) -> str:
        """Return text with the newest loss that has arrived on the host."""
        copy = HostCopy(loss.reshape(1))
        for latest in (self._loss, copy):
            if latest is not None and latest.has_arrived:
                self._text = f"loss {latest.values()[0]:.4f}"
        self._loss = copy
        return self._text

    def logged(self, line: Mapping[str, Any]) -> None:
        """Show a line of ``metrics.jsonl``."""
        skipped = "  skipped" if line["skipped"] else ""
        numbers = f"loss {line['loss']:.4f}  grad norm {line['grad_norm']:.4f}  lr {line['lr']:.3g}"
        self._tell(line["step"], f"{numbers}  {line['samples_per_second']:,.1f} samples/s{skipped}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an evaluation."""
        self._tell(step, "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def saved(self, step: int, path: Path) -> None:
        """Show that a checkpoint is complete."""
        self._tell(step, f"saved {path}")

    def _tell(self, step: int, text: str) -> None:
        if self._in_lines:
            print_lines(f"step {step:,}/{self._total:,}  {text}")
