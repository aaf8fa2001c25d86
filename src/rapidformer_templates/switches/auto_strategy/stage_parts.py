"""A run of blocks on a pipeline's worker: what a micro batch through it takes, as a trace of so many blocks tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.switches.auto_strategy.trace import Phase, Trace

BACKWARD = ("reduce", "backward", "end")
"""Phases after the turn from the loss."""


@dataclass(frozen=True)
class Part:
    """All blocks of a worker, or, where stages are interleaved, one of its runs of blocks.

    Attributes:
        trace: of a micro batch through a whole model with so many blocks.
        is_first, is_last: of the model, with what comes before the blocks, and with head and loss.
        tied_bytes: gradients that in a whole model wait for those of the embedding; stages have a copy each.
        shares_casts: whether all micro batches of a step have one copy of the weights by autocast.
        offloads: whether what blocks keep goes to the host.
    """

    trace: Trace
    is_first: bool
    is_last: bool
    tied_bytes: int
    shares_casts: bool
    offloads: bool

    @cached_property
    def kept(self) -> int:
        """Bytes that a micro batch leaves here until its backward."""
        trace = self.trace
        kept = trace.kept - self.casts
        if not self.is_last:
            kept -= trace.kept_output  # the values that it sends it does not keep
        if not self.is_first:
            kept += trace.hidden - trace.phases[0].kept
        return kept

    @cached_property
    def casts(self) -> int:
        """Of the copies that all micro batches have together."""
        return self.trace.casts if self.shares_casts else 0

    @cached_property
    def kept_by_last(self) -> int:
        """What has not gone to the host of the newest micro batch here."""
        return self.trace.kept_by_last if self.offloads else 0

    @cached_property
    def of_others(self) -> int:
        """Bytes of gradients in the trace that are finished before those of this part are: those of the head."""
        phases = self.trace.phases
        if self.is_last:
            return 0
        first = next((i for i, phase in enumerate(phases) if phase.name == "backward"), 0)
        return phases[first - 1].finished if first else 0

    def phases(self, *, forward: bool) -> Iterator[tuple[Phase, int]]:
        """The phases of its forwards or backwards, each with its bytes besides the states and finished gradients."""
        phases, given, given_up = self.trace.phases, 0, 0
        if not self.is_first:
            given = self.trace.hidden  # it came in the place of the embedding
            given -= 0 if self.offloads else phases[0].end  # else what an embedding leaves is no longer there
        made = {phase.stack: phase.casts for phase in phases if phase.name == "forward"}
        for number, phase in enumerate(phases):
            if forward is self._is_forward(phase) and self._has(number):
                apart = self.tied_bytes if phase.name in BACKWARD else 0
                yield phase, phase.peak_without_gradients + given + given_up - apart
            if phase.name == "backward" and self.shares_casts:
                given_up += made[phase.stack]

    @staticmethod
    def _is_forward(phase: Phase) -> bool:
        return phase.name in ("begin", "forward", "head")

    def _has(self, number: int) -> bool:
        """Whether a phase of the whole model is one of this part, too: head and loss are the last one's alone."""
        phases = self.trace.phases
        name = phases[number].name
        if name in ("begin", "end"):
            return self.is_first
        if name in ("head", "turn"):
            return self.is_last
        backwards = [index for index, phase in enumerate(phases) if phase.name == "backward"]
        return self.is_last or name != "reduce" or not backwards or number > backwards[0]
