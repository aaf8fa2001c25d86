"""A run of blocks on a pipeline worker, and the memory of a micro batch through it, from a trace of equal depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.switches.auto_strategy.trace import Phase, Trace

BACKWARD = ("reduce", "backward", "end")
"""Phases of the backward, after ``turn``."""


@dataclass(frozen=True)
class StagePart:
    """All blocks of a worker, or one of its runs of blocks if stages are interleaved.

    Attributes:
        trace: trace of a micro batch through a whole model with this number of blocks.
        is_first, is_last: whether it is the model's first or last part. The first has everything before the blocks,
            the last has head and loss.
        tied_bytes: gradients that wait for the embedding's in an undivided model. Here, stages have a copy each.
        shares_casts: whether all micro batches of a step share one autocast copy of the weights.
        offloads: whether activations that the blocks keep go to the host.
    """

    trace: Trace
    is_first: bool
    is_last: bool
    tied_bytes: int
    shares_casts: bool
    offloads: bool

    @cached_property
    def saved(self) -> int:
        """Bytes that a micro batch keeps here until its backward."""
        trace = self.trace
        bytes_kept = trace.saved - self.casts
        if not self.is_last:
            bytes_kept -= trace.kept_output  # the stage does not keep the values that it sends
        if not self.is_first:
            bytes_kept += trace.hidden - trace.phases[0].saved
        return bytes_kept

    @cached_property
    def casts(self) -> int:
        """Bytes of autocast copies that all micro batches of a step share."""
        return self.trace.casts if self.shares_casts else 0

    @cached_property
    def kept_by_last(self) -> int:
        """Bytes of the newest micro batch here that have not gone to the host."""
        return self.trace.kept_by_last if self.offloads else 0

    @cached_property
    def head_gradients(self) -> int:
        """Bytes of gradients that the trace finishes before those of this part: the gradients of the head."""
        phases = self.trace.phases
        if self.is_last:
            return 0
        first = next((i for i, phase in enumerate(phases) if phase.name == "backward"), 0)
        return phases[first - 1].finished if first else 0

    def phases(self, *, forward: bool) -> Iterator[tuple[Phase, int]]:
        """Yield the phases of its forwards or backwards, with their bytes beyond the states and finished gradients."""
        phases, input_bytes, released_casts = self.trace.phases, 0, 0
        if not self.is_first:
            input_bytes = self.trace.hidden  # it arrives in place of the embedding
            # without offloading, the embedding's output is no longer there
            input_bytes -= 0 if self.offloads else phases[0].end
        casts_by_stack = {phase.stack: phase.casts for phase in phases if phase.name == "forward"}
        for number, phase in enumerate(phases):
            is_forward = phase.name in ("begin", "forward", "head")
            if forward is is_forward and self._has(number):
                others = self.tied_bytes if phase.name in BACKWARD else 0
                yield phase, phase.peak_without_gradients + input_bytes + released_casts - others
            if phase.name == "backward" and self.shares_casts:
                released_casts += casts_by_stack[phase.stack]

    def _has(self, number: int) -> bool:
        """Whether this part has a phase of the whole model. Only the last part has head and loss."""
        phases = self.trace.phases
        name = phases[number].name
        if name in ("begin", "end"):
            return self.is_first
        if name in ("head", "turn"):
            return self.is_last
        backwards = [index for index, phase in enumerate(phases) if phase.name == "backward"]
        return self.is_last or name != "reduce" or not backwards or number > backwards[0]
