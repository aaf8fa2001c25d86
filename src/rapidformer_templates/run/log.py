"""The log of a run: its lines of metrics in ``metrics.jsonl``, in the trackers and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rapidformer_templates.run.folder import MetricsFile
from rapidformer_templates.run.progress import Progress
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.tracking import Trackers, open_trackers
from rapidformer_templates.system.terminal import say


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

    def end_trackers(self, summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
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
