"""Memory of a worker of a 3D layout: its stage's share of the model, and the micro batches that are on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from rapidformer_templates.engines.parallel.windows import Window, turns, window_for
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.model_shapes import Coordinates, Exchanged, ModelShapes, Variant
from rapidformer_templates.switches.auto_strategy.optimizer_states import BF16, FP32, Facts
from rapidformer_templates.switches.auto_strategy.setting import NarrowWeights, Setting
from rapidformer_templates.switches.auto_strategy.state_bytes import Held
from rapidformer_templates.switches.auto_strategy.trace import Phase, Trace

SENT = 2
"""Transfers in each direction that a stage holds until they have surely arrived."""


@dataclass(frozen=True)
class Pass:
    """A micro batch's forward and backward, as far as others matter to what it needs.

    Attributes:
        beside: bytes of the other micro batches that are on their way, and of what travels between stages.
        adds: whether gradients of earlier ones are there, to which its own are added.
        exchanges: whether its gradients go to other replicas during its backward.
    """

    beside: int
    adds: bool
    exchanges: bool


@dataclass(frozen=True)
class Moment:
    """Bytes beside parameters and optimizer state at a moment."""

    activations: int
    gradients: int
    buffers: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.buffers


def telling_stages(model: ModelShapes, layout: Layout, setting: Setting) -> list[Stage]:
    """The stages among which the one is that needs most: of equal stages, the first holds most micro batches.

    Raises:
        ModelError: the model cannot be cut in this way.
    """
    stages = [Stage(model, layout, rank, setting) for rank in range(layout.pipeline)]
    middle = {stage.blocks: stage for stage in reversed(stages[1:-1])}
    return [stages[0], *middle.values(), *stages[1:][-1:]]


class Stage:
    """The part of the model that a pipeline rank has, as its tensor-parallel group shares it.

    Attributes:
        rank: from 0.
        coordinates: of the worker; among those who share the blocks' matrices, the first has most.
    """

    def __init__(
        self,
        model: ModelShapes,
        layout: Layout,
        rank: int,
        setting: Setting,
        peer: int = 0,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """``blocks``: from one number up to the other; by default as the layout is cut."""
        self.model, self.layout, self.rank, self.setting = model, layout, rank, setting
        begin, end = blocks or self._own_blocks()
        self.coordinates = Coordinates(layout.tensor, layout.pipeline, rank, begin, end, peer, setting.experts_over)

    def _own_blocks(self) -> tuple[int, int]:
        if self.layout.pipeline == 1:
            return 0, sum(self.model.depths.values())
        sizes = self.layout.stages or self.model.stage_sizes(self.layout.pipeline)
        begin = sum(sizes[: self.rank])
        return begin, begin + sizes[self.rank]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.layout.pipeline - 1

    @property
    def parameters(self) -> dict[str, Facts]:
        """Its trained parameters by name.

        Raises:
            ModelError: the model cannot be cut or divided in this way.
        """
        return self.model.stage_parameters(self.coordinates)

    @property
    def blocks(self) -> int:
        """How many it has."""
        return self.coordinates.end - self.coordinates.begin

    @property
    def in_flight(self) -> int:
        """Micro batches whose activations it holds at a time: 1F1B (Narayanan et al., 2021, section 2.2)."""
        return min(self.layout.pipeline - self.rank, self.layout.accumulation)

    def held(self, replica: int | None = None) -> Held:
        """The states of a replica's worker, by default of the largest; gradients when the last backward has ended."""
        replica = self.largest_replica if replica is None else replica
        mine = list(self.parameters.values())
        if self._is_sharded:
            mine = self._runs_of(replica)
        parameters = self._bytes(BF16) + sum(p.frozen_bytes for p in self.model.stage_frozen(self.coordinates))
        width = self._types.accumulate
        gradients = self._share(self._windows, replica) if self._is_sharded else self._bytes(width)
        optimizer = self.setting.how.optimizer.bytes_of(mine)
        if self._has_masters:
            optimizer += FP32 * sum(part.count for part in mine if part.narrows)
        if not self.setting.offload:
            return Held(parameters, gradients, optimizer)
        copies = 2 * FP32 * sum(part.count for part in mine)  # of weights and gradients, for the update on the host
        return Held(parameters, gradients, optimizer, on_host=(0, 0, optimizer), host_copies=copies)

    @cached_property
    def largest_replica(self) -> int:
        """The replica that updates most; where runs are shared out the first, whose shares have no padding."""
        if not self._is_sharded or self.setting.updates_elements:
            return 0
        counts = [sum(part.count for part in self._runs_of(replica)) for replica in range(self.layout.replicas)]
        return counts.index(max(counts))

    def _runs_of(self, replica: int) -> list[Facts]:
        whole = not self.setting.updates_elements
        return self.model.runs(self.coordinates, self.layout.replicas, replica, masters=self._has_masters, whole=whole)

    @property
    def _has_masters(self) -> bool:
        return self.setting.narrow is not None

    @property
    def _types(self) -> NarrowWeights:
        return self.setting.narrow or NarrowWeights()

    def _width(self, narrows: bool, width: int) -> int:
        """Bytes of a number, which are ``width`` for a parameter of 16 bits."""
        return width if narrows and self._has_masters else FP32

    def _bytes(self, width: int) -> int:
        """Of all trained parameters, or of their gradients; of those of 16 bits at ``width`` bytes a number."""
        return sum(self._width(facts.narrows, width) * facts.count for facts in self.parameters.values())

    @property
    def _is_sharded(self) -> bool:
        """Whether each replica keeps the optimizer state of a share."""
        return self.layout.partitioning != "none" and self.layout.replicas > 1

    @property
    def _sums_early(self) -> bool:
        """ZeRO-2: gradients go to their owners in each backward."""
        return self.layout.partitioning == "zero-2" and self.layout.replicas > 1

    def moments(self, variant: Variant, *, exact: bool) -> list[Moment]:
        """What lies beside the states, phase by phase, when most micro batches are in flight, and after them."""
        trace = self._trace(variant, exact=exact)
        given = 0 if self.is_first else trace.hidden  # it came in the place of the embedding
        if not variant.offload:  # else what an embedding leaves is no longer there
            given -= 0 if self.is_first else trace.phases[0].end
        corrections, beside = self._corrections(trace.phases), self._in_flight_beside(trace)
        moments: list[Moment] = []
        left = 0
        for number, phase in enumerate(trace.phases):
            if self._has(trace.phases, number):
                alone = phase.peak_without_gradients + given + corrections[number]
                leaving = self._complete(phase.finished - self._of_others(trace.phases))
                moments += [self._moment(phase, alone, each, left, leaving) for each in beside]
                left = leaving
        return [*moments, *self._after(max(each.beside for each in beside))]

    def sent(self, variant: Variant, *, exact: bool) -> int:
        """Bytes of its micro batches in flight that are on the host at a time."""
        trace = self._trace(variant, exact=exact)
        last = trace.kept_by_last if variant.offload and self.in_flight > 1 else 0  # goes where another forward comes
        return self.in_flight * (trace.sent + last)

    def _trace(self, variant: Variant, *, exact: bool) -> Trace:
        return self.model.trace(variant, self.blocks if self.layout.pipeline > 1 else None, exact=exact)

    @property
    def _offloads(self) -> bool:
        return self.setting.offloads_activations

    def _in_flight_beside(self, trace: Trace) -> list[Pass]:
        """The passes of micro batches that may need most."""
        layout = self.layout
        last = Pass(0, adds=layout.accumulation > 1, exchanges=layout.replicas > 1)
        if layout.pipeline == 1:
            return [Pass(0, adds=True, exchanges=self._sums_early), last] if last.adds else [last]
        kept = trace.kept - (trace.casts if self._shares_casts else 0)
        if not self.is_last:
            kept -= trace.hidden  # the values that it sends it does not keep
        if not self.is_first:
            kept += trace.hidden - trace.phases[0].kept
        sent = min(SENT, layout.accumulation)
        travel = (0 if self.is_last else sent) + (0 if self.is_first else sent + 1)
        arriving = travel * trace.hidden
        if layout.accumulation == 1:
            return [replace(last, beside=arriving)]
        # Of those on their way only the newest forward's last block has not been sent to the host yet.
        here = trace.kept_by_last if self._offloads else 0
        waiting = (self.in_flight - 1) * kept - max(self.in_flight - 2, 0) * here
        first = Pass(waiting + arriving, adds=False, exchanges=self._sums_early)
        # The first backward leaves gradients behind. After it one micro batch more comes in, if there is one.
        others = min(self.in_flight, layout.accumulation - 1) - 1
        later = Pass(others * kept - max(others - 1, 0) * here + arriving, adds=True, exchanges=self._sums_early)
        return [first, later, replace(last, beside=arriving)]

    @property
    def _shares_casts(self) -> bool:
        """Whether all micro batches of a step have one copy of the weights by autocast."""
        return self.layout.pipeline > 1 and self.layout.recompute == "none"

    def _corrections(self, phases: Sequence[Phase]) -> list[int]:
        """For each phase, bytes by which a stage differs from the whole model in one micro batch."""
        made = {phase.stack: phase.casts for phase in phases if phase.name == "forward"}
        given_up, corrections = 0, []
        for phase in phases:
            goes_back = phase.name in ("reduce", "backward", "end") and self.layout.pipeline > 1
            corrections.append(given_up - (self._tied_bytes if goes_back else 0))
            if phase.name == "backward" and self._shares_casts:
                given_up += made[phase.stack]
        return corrections

    @cached_property
    def _tied_bytes(self) -> int:
        """Gradients that in a whole model wait for those of the embedding; its stages have a copy each."""
        shared = (name for name in self.parameters if len(self.model.names_of(name)) > 1)
        tied = (self.parameters[name] for name in shared if len(self.model.ends_of(name)) > 1)
        return sum(self._width(facts.narrows, BF16) * facts.count for facts in tied)

    def _moment(self, phase: Phase, activations: int, of: Pass, left: int, leaving: int) -> Moment:
        """A phase of a pass.

        Args:
            activations: without those of other micro batches.
            left, leaving: windows that are complete when the phase begins, and when it ends.
        """
        unfinished = self._of_own_experts(phase.peak - phase.peak_without_gradients)
        if not of.exchanges:
            gradients = self._bytes(self._types.accumulate) if of.adds else unfinished
            return self._beside_states(activations + of.beside, gradients, 0)
        gone, begun = self._windows[:left], self._windows[:leaving]
        summed = of.adds and not self._sums_early
        gradients = self._bytes(self._types.accumulate) if summed else unfinished
        if self._is_sharded:  # what is packed is given up, and what was not added to others is of 16 bits
            waiting = max(0, gradients - sum(self._sum_of(each) for each in gone) - self._unshared)
            if not summed:
                waiting = waiting * self._bytes(BF16) // self._bytes(self._types.accumulate)
            gradients = waiting + self._shares(self._windows if of.adds and self._sums_early else begun)
        flights = (1 if gone else 0) + (1 if leaving > left else 0)
        return self._beside_states(activations + of.beside, gradients, self._on_their_way(begun, flights))

    def _after(self, others: int) -> list[Moment]:
        """After the last gradient of a pass, and in the update; ``others``: bytes of other micro batches."""
        tied = [each for each in self._windows if each.is_tied]
        kept, copied = self._bytes(self._types.accumulate), self._copied_for_update()
        waiting = self._on_their_way(self._windows, 2) if self.layout.replicas > 1 or tied else 0
        if not self._is_sharded:
            copies_elsewhere = sum(self._packed(each) for each in tied)
            return [self._beside_states(0, kept, max(waiting + copies_elsewhere, copied))]
        shares, late = self._shares(self._windows), sum(self._sum_of(each) for each in tied)
        sent = self._beside_states(others if self._sums_early else 0, shares + late, waiting)
        gathered = max(self._width(each.narrow, BF16) * self._gathered(each.window) for each in self._windows)
        return [sent, self._beside_states(0, shares, max(copied, gathered))]

    def _copied_for_update(self) -> int:
        """Bytes of gradients of 16 bits that are there in fp32 at a time, as the optimizer takes them."""
        if self._types.accumulate == FP32:
            return 0
        if self._is_sharded:
            sizes = [each.narrow * each.share_of(self.largest_replica) for each in self._windows]
        else:
            facts = list(self.parameters.values())
            parts = turns([each.count for each in facts], window_for(self.model.width))
            sizes = [sum(facts[place].narrows * facts[place].count for place in part) for part in parts]
        return FP32 * (max(sizes, default=0) if self.setting.updates_apart else sum(sizes))

    def _beside_states(self, activations: int, gradients: int, buffers: int) -> Moment:
        """A moment; gradients beyond those that the update needs count as buffers."""
        there = min(gradients, self._held_gradients)
        return Moment(activations, there, buffers + gradients - there)

    @cached_property
    def _held_gradients(self) -> int:
        return self.held().gradients

    # What is exchanged with the other replicas.

    @cached_property
    def _windows(self) -> list[Exchanged]:
        whole = self._is_sharded and not self.setting.updates_elements
        return self.model.windows(self.coordinates, self.layout.replicas, masters=self._has_masters, whole=whole)

    def _packed(self, each: Exchanged) -> int:
        """Bytes of a window's gradients on their way."""
        return self._width(each.narrow, self._types.reduce) * each.window.packed

    def _sum_of(self, each: Exchanged) -> int:
        """Bytes of a window's gradients where they are added up."""
        return self._width(each.narrow, self._types.accumulate) * each.window.length

    def _shares(self, of: Iterable[Exchanged]) -> int:
        """Bytes of the largest replica's shares of summed windows, with padding, and of what is not shared."""
        return self._share(of, self.largest_replica)

    def _share(self, of: Iterable[Exchanged], replica: int) -> int:
        width = self._types.accumulate
        return self._unshared + sum(self._width(each.narrow, width) * each.share_of(replica) for each in of)

    @cached_property
    def _unshared(self) -> int:
        """Bytes of the gradients of experts that no other replica has."""
        alone = self.model.unshared(self.coordinates, self.layout.replicas)
        return sum(self._width(facts.narrows, self._types.accumulate) * facts.count for facts in alone)

    def _of_own_experts(self, traced: int) -> int:
        """Bytes of gradients here, of so many in a trace, which has all experts."""
        if self.coordinates.experts == 1:
            return traced
        everything = self.model.stage_parameters(self.coordinates._replace(experts=1)).values()
        return traced * sum(facts.count for facts in self.parameters.values()) // sum(f.count for f in everything)

    @staticmethod
    def _gathered(window: Window) -> int:
        """Elements that lie beside the weights when a window's updated ones are sent."""
        return window.packed if window.owner is not None else window.share + window.packed

    def _complete(self, finished: int) -> int:
        """How many windows have all their gradients, of which so many bytes are finished."""
        ends = accumulate(self._sum_of(each) * each.over for each in self._windows if not each.is_tied)
        return sum(end <= finished for end in ends)

    def _on_their_way(self, begun: Sequence[Exchanged], count: int) -> int:
        """Bytes of so many windows that are sent at a time, and of what has come of them."""
        largest = sorted((self._packed(each) for each in begun), reverse=True)[:count]
        shares = self._sums_early and self.setting.updates_elements  # else a whole parameter's owner sums in place
        return sum(size + (size // self.layout.replicas if shares else 0) for size in largest)

    def _of_others(self, phases: Sequence[Phase]) -> int:
        """Bytes of gradients in a trace that are finished before those of this stage are: those of the head."""
        if self.is_last:
            return 0
        first = next((i for i, phase in enumerate(phases) if phase.name == "backward"), 0)
        return phases[first - 1].finished if first else 0

    def _has(self, phases: Sequence[Phase], number: int) -> bool:
        """Whether a phase of the whole model is one of this stage, too: head and loss are the last one's alone."""
        name = phases[number].name
        if name in ("begin", "end"):
            return self.is_first
        if name in ("head", "turn"):
            return self.is_last
        backwards = [index for index, phase in enumerate(phases) if phase.name == "backward"]
        return self.is_last or name != "reduce" or not backwards or number > backwards[0]
