"""A pipeline worker's forwards and backwards in a step, and the memory of a micro batch in each of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from rapidformer_templates.switches.auto_strategy.trace import Phase, Trace
from rapidformer_templates.switches.layout.schedule import LEAVING, Action, Kind, with_transfers

ENOUGH_ROUNDS = 4
"""Rounds of one micro batch per worker. More rounds only repeat the same passes."""


class Pass(NamedTuple):
    """A forward or backward of a micro batch through one of a worker's parts.

    Attributes:
        part: index of the part.
        is_forward: True for a forward, False for a backward.
        others: pairs of a part and its number of other micro batches whose activations wait for their backwards.
        newest: part of the newest of these micro batches.
        travelling: tensors that have arrived from other workers for later passes, or that may still be in flight.
        begun: parts that have had a forward.
        added: parts with gradients of earlier micro batches.
        summed: parts whose last backward is over.
        is_last: whether this is the part's last backward.
    """

    part: int
    is_forward: bool
    others: tuple[tuple[int, int], ...]
    newest: int | None
    travelling: int
    begun: frozenset[int]
    added: frozenset[int]
    summed: frozenset[int]
    is_last: bool


def passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    """Return the different passes of a step on one worker.

    Args:
        workers: workers of the pipeline. 1 means no pipeline.
        rank: rank of this worker in the pipeline.
        per_worker: parts of each worker. With more than one, they are interleaved.
        microbatches: micro batches of the step.
    """
    if per_worker == 1 or microbatches % workers == 0:
        microbatches = min(microbatches, ENOUGH_ROUNDS * workers)
    return _passes(workers, rank, per_worker, microbatches)


@cache
def _passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    passes_seen: dict[Pass, None] = {}
    alive: list[Action] = []
    come: Counter[tuple[int, int]] = Counter()
    sent: Counter[Kind] = Counter()
    begun, added, summed = (frozenset[int]() for _ in range(3))
    for action in with_transfers(workers, per_worker, microbatches)[rank]:
        kind, stage, number = action
        part, place = stage // workers, (stage, number)
        if kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            come[place] += 1
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            sent[kind] = min(sent[kind] + 1, LEAVING * per_worker)
        if kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        come[place] = 0
        alive = [other for other in alive if (other.stage, other.microbatch) != place]
        others = Counter(other.stage // workers for other in alive)
        passes_seen[
            Pass(
                part,
                kind is Kind.FORWARD,
                tuple(sorted(others.items())),
                alive[-1].stage // workers if alive else None,
                come.total() + sent.total(),
                begun,
                added,
                summed,
                kind is Kind.BACKWARD and number == microbatches - 1,
            )
        ] = None
        if kind is Kind.FORWARD:
            alive.append(action)
            begun |= {part}
        else:
            added |= {part}
            summed |= {part} if number == microbatches - 1 else set()
    return tuple(passes_seen)


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
