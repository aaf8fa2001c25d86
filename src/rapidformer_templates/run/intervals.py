"""When a run is logged, evaluated and saved, alike on all of its workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rapidformer_templates.planning.intervals import Interval

EVALUATE, SAVE = "evaluate", "save"
BITS = {EVALUATE: 1, SAVE: 2}
now = time.monotonic


@dataclass
class Intervals:
    """What is due after a step; after the last one everything is.

    Steps, samples and tokens are counted by the run, so that a resumed one goes on in the same places. Minutes are
    those of the main worker's clock, from its start or from the last time; the workers hear of it in the exchange
    before a step.

    Attributes:
        log: steps between lines in ``metrics.jsonl``.
        epoch: steps of one; 0 in a run that is not counted in epochs.
        every: the interval of what is not done at the end of each epoch, by name.
    """

    log: int
    epoch: int
    every: Mapping[str, Interval]
    _begun: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begun = dict.fromkeys(self.every, now())

    def logs(self, step: int, total: int) -> bool:
        """Whether a line of metrics is due."""
        return step == total or step % self.log == 0

    def by_clock(self) -> int:
        """A bit for each of :data:`BITS` whose minutes are over; the main worker tells them to the others."""
        return sum(BITS[name] for name, interval in self._timed() if now() - self._begun[name] >= 60 * interval.size)

    def due(self, name: str, before: Mapping[str, int], after: Mapping[str, int], total: int, by_clock: int) -> bool:
        """Whether it is to be done after a step.

        Args:
            name: of :data:`BITS`.
            before: steps, samples and tokens that were done before the step.
            after: those that are done with it.
            by_clock: what :meth:`by_clock` of the main worker gave before the step.
        """
        interval, step = self.every.get(name), after["steps"]
        if interval is None:
            return step == total or (self.epoch > 0 and step % self.epoch == 0)
        if interval.unit == "minutes":
            if due := bool(by_clock & BITS[name]):
                self._begun[name] = now()
            return due or step == total
        return interval.passed(before[interval.unit], after[interval.unit]) or step == total

    def _timed(self) -> Iterator[tuple[str, Interval]]:
        return ((name, interval) for name, interval in self.every.items() if interval.unit == "minutes")
