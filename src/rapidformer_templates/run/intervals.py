"""Decides when a run is logged, evaluated and saved, with the same result on all workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from rapidformer_templates.planning.flag_values import Interval

EVALUATE, SAVE = "evaluate", "save"
DUE_BITS = {EVALUATE: 1, SAVE: 2}
PRINTED_LINES, CURVE_POINTS, MAX_LOG_INTERVAL = 20, 100, 100
now = time.monotonic


@dataclass
class Intervals:
    """Decides what is due after a step. Everything is due after the last one.

    The run counts steps, samples and tokens, so that a resumed run acts at the same points. Epochs are counted in
    steps. Minutes are measured by the main worker, since its start or since the last time. The other workers receive
    its decision in the exchange before a step.

    Attributes:
        log: steps between lines in ``metrics.jsonl``.
        show: steps between printed lines, a multiple of ``log``.
        steps_per_epoch: optimizer steps of one pass over the data. 0 for a stream.
        counts_epochs: whether the length of the run is given in epochs.
        every: the interval of each action by name. Actions without one are due at the end of each epoch.
    """

    log: int
    show: int
    steps_per_epoch: int
    counts_epochs: bool
    every: Mapping[str, Interval]
    _begun: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begun = dict.fromkeys(self.every, now())

    def logs(self, step: int, total: int) -> bool:
        """Whether a line of metrics is due."""
        return step == total or step % self.log == 0

    def shows(self, step: int, total: int) -> bool:
        """Whether that line is printed."""
        return step == total or step % self.show == 0

    def epoch_ends(self, step: int) -> bool:
        """Whether a step is the last one of an epoch, in a run that is counted in epochs."""
        return self.counts_epochs and step % self.steps_per_epoch == 0

    def due_by_clock(self) -> int:
        """Return the :data:`DUE_BITS` whose minutes have passed. The main worker sends them to the others."""
        timed = ((name, interval) for name, interval in self.every.items() if interval.unit == "minutes")
        return sum(DUE_BITS[name] for name, interval in timed if now() - self._begun[name] >= 60 * interval.size)

    def due(self, name: str, before: Mapping[str, int], after: Mapping[str, int], total: int, by_clock: int) -> bool:
        """Whether an action is due after a step.

        Args:
            name: one of :data:`DUE_BITS`.
            before: completed steps, samples and tokens before the step.
            after: completed steps, samples and tokens including the step.
            due_by_clock: result of the main worker's :meth:`due_by_clock` before the step.
        """
        interval, step = self.every.get(name), after["steps"]
        if interval is None:
            return step == total or self.epoch_ends(step)
        if interval.unit == "epochs":
            epochs = (Fraction(steps, self.steps_per_epoch) for steps in (before["steps"], step))
            return interval.passed(*epochs) or step == total
        if interval.unit == "minutes":
            if due := bool(by_clock & DUE_BITS[name]):
                self._begun[name] = now()
            return due or step == total
        return interval.passed(before[interval.unit], after[interval.unit]) or step == total


def log_intervals(total: int, chosen: int | None) -> tuple[int, int]:
    """Return the steps between lines in ``metrics.jsonl``, and between printed lines.

    By default the curves of a run have at least 100 points, with at most 100 steps between them. About 20 of these
    lines are printed.

    >>> log_intervals(60, None), log_intervals(1_000, None), log_intervals(100_000, None), log_intervals(1_000, 7)
    ((1, 3), (10, 50), (100, 5000), (7, 7))
    """
    if chosen is not None:
        return chosen, chosen
    log = min(max(total // CURVE_POINTS, 1), MAX_LOG_INTERVAL)
    return log, max(round(total / PRINTED_LINES / log), 1) * log
