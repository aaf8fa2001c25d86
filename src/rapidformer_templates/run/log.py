"""The log of a run: lines of metrics in ``metrics.jsonl`` and in the trackers, and the progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates.run.folder import MetricsFile, Summary
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.tracking import TrackerResult, Trackers, open_trackers
from rapidformer_templates.system.accelerator import HostCopy
from rapidformer_templates.system.terminal import ProgressBar, print_lines, say


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


@dataclass
class Log:
    """Records the metrics of a run on its main worker.

    Attributes:
        metrics: the file of the run folder. None without a folder, and on other workers.
        trackers: the trackers, on the main worker only. None if there are none.
        progress: the display on the terminal.
    """

    metrics: MetricsFile | None
    trackers: Trackers | None
    progress: Progress

    def record(self, line: Mapping[str, Any]) -> None:
        """Write a line of metrics to the file and the trackers."""
        if self.metrics:
            self.metrics.write(line)
        if self.trackers:
            self.trackers.log(line)

    def flush_trackers(self) -> None:
        """Send the values of the current step to the trackers."""
        if self.trackers:
            self.trackers.flush()

    def sync(self) -> None:
        """Flush the file to disk, so that no checkpoint is ahead of its metrics."""
        if self.metrics:
            self.metrics.sync()

    def end_trackers(self, summary: Summary) -> dict[str, TrackerResult]:
        """Send the summary to the trackers, and return where each one shows the run."""
        return self.trackers.end(summary) if self.trackers else {}

    def close(self) -> None:
        """Close the trackers."""
        if self.trackers:
            self.trackers.close()


def open_log(run: Run, total: int) -> Log:
    """Open the log of a run with ``total`` steps at its current position."""
    folder, step, is_main = run.folder, run.position.step, run.workers.is_main
    metrics = MetricsFile(folder.metrics, step) if folder and is_main else None
    if metrics and metrics.garbled:
        numbers = ", ".join(map(str, metrics.garbled[:8])) + (" …" if len(metrics.garbled) > 8 else "")
        say(run.workers, f"left out lines of metrics.jsonl that cannot be read: {numbers}", loud=True)
    return Log(metrics, open_trackers(run), Progress(total, step, show=is_main))
