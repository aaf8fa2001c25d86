"""Memory of a worker of a 3D layout: its stage's share of the model, and the micro batches that are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.engines.parallel.windows import WINDOW, Window
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.model_shapes import Coordinates, ModelShapes, Variant
from rapidformer_templates.switches.auto_strategy.optimizer_states import FP32, Facts, runs
from rapidformer_templates.switches.auto_strategy.setting import Setting
from rapidformer_templates.switches.auto_strategy.state_bytes import Held
from rapidformer_templates.switches.auto_strategy.trace import Phase, Trace

SENT = 2
"""Transfers in each direction that a stage holds until they have surely arrived."""


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
        self.coordinates = Coordinates(layout.tensor, layout.pipeline, rank, begin, end, peer)

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

    def held(self, replica: int = 0) -> Held:
        """The states of a replica's worker; gradients when the last backward has ended."""
        mine = list(self.parameters.values())
        if self.layout.partitioning != "none" and self.layout.data > 1:
            mine = runs(self.model.runs(self.coordinates, self.layout.data, replica))
        parameters = self._bytes + sum(facts.frozen_bytes for facts in self.model.stage_frozen(self.coordinates))
        gradients = self._share_bytes if self._sums_early else self._bytes
        optimizer = self.setting.how.optimizer.bytes_of(mine)
        if not self.setting.offload:
            return Held(parameters, gradients, optimizer)
        copies = 2 * FP32 * sum(part.count for part in mine)  # of weights and gradients, for the update on the host
        return Held(parameters, gradients, optimizer, on_host=(0, 0, optimizer), host_copies=copies)

    @cached_property
    def _bytes(self) -> int:
        return FP32 * sum(facts.count for facts in self.parameters.values())

    @property
    def _share_bytes(self) -> int:
        """A replica's share of all windows, with padding."""
        return FP32 * sum(window.share for window in self._windows)

    @property
    def _sums_early(self) -> bool:
        """ZeRO-2: gradients go to their owners in each backward."""
        return self.layout.partitioning == "zero-2" and self.layout.data > 1

    @property
    def _windows(self) -> list[Window]:
        return self.model.windows(self.coordinates, self.layout.data)

    def moments(self, variant: Variant, *, exact: bool) -> list[Moment]:
        """What lies beside the states, phase by phase, when most micro batches are in flight, and after them."""
        layout, held = self.layout, self.held()
        trace = self.model.trace(variant, self.blocks if layout.pipeline > 1 else None, exact=exact)
        given = 0 if self.is_first else trace.hidden - trace.phases[0].end  # it came in the place of the embedding
        corrections = self._corrections(trace.phases)
        moments = []
        for number, phase in enumerate(trace.phases):
            if self._has(trace.phases, number):
                alone = phase.peak_without_gradients + given + corrections[number]
                for beside, adds in self._in_flight_beside(trace):
                    moments.append(self._moment(phase, alone + beside, held, adds=adds))
        return [*moments, *self._exchange(max(beside for beside, _ in self._in_flight_beside(trace)), held)]

    def _in_flight_beside(self, trace: Trace) -> list[tuple[int, bool]]:
        """(bytes of the other micro batches that are on their way and of what travels, whether gradients are there)."""
        layout = self.layout
        if layout.pipeline == 1:
            return [(0, layout.accumulation > 1)]
        kept = trace.kept - (trace.casts if self._shares_casts else 0)
        if not self.is_last:
            kept -= trace.hidden  # the values that it sends it does not keep
        if not self.is_first:
            kept += trace.hidden - trace.phases[0].kept
        sent = min(SENT, layout.accumulation)
        travel = (0 if self.is_last else sent) + (0 if self.is_first else sent + 1)
        first = ((self.in_flight - 1) * kept + travel * trace.hidden, False)
        # The first backward leaves gradients behind. After it one micro batch more comes in, if there is one.
        others = min(self.in_flight, layout.accumulation - 1) - 1
        later = (others * kept + travel * trace.hidden, True)
        return [first, later] if layout.accumulation > 1 else [first]

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
        return FP32 * sum(self.parameters[name].count for name in shared if len(self.model.ends_of(name)) > 1)

    def _moment(self, phase: Phase, activations: int, held: Held, *, adds: bool) -> Moment:
        """``adds``: whether gradients of earlier micro batches are there."""
        unfinished = phase.peak - phase.peak_without_gradients
        if not self._sums_early:
            return Moment(activations, held.gradients if adds else unfinished, 0)
        added_up = held.gradients if adds else 0
        if self._window_bytes < self._bytes:  # what is packed is given up; a window fills while another travels
            return Moment(activations, added_up, 3 * self._window_bytes if phase.after_first_gradient else 0)
        return Moment(activations, added_up + unfinished, 0)

    def _exchange(self, others: int, held: Held) -> list[Moment]:
        """While the last window is packed and sent, and in the update."""
        if self.layout.data == 1:
            return [Moment(0, held.gradients, 0)]
        largest = FP32 * max(window.share for window in self._windows) * self.layout.data
        received = self._share_bytes if self.layout.partitioning != "none" else 0
        if self._sums_early:
            before = held.gradients if self.layout.accumulation > 1 else 0
            # Gradients that are not packed yet, and at most two windows of those that are.
            return [Moment(others, before, min(self._bytes + largest, 3 * largest) + received)]
        return [Moment(0, held.gradients, min(self._bytes, 2 * largest) + received)]

    @property
    def _window_bytes(self) -> int:
        return FP32 * min(WINDOW, sum(facts.count for facts in self.parameters.values()))

    def _has(self, phases: Sequence[Phase], number: int) -> bool:
        """Whether a phase of the whole model is one of this stage, too: head and loss are the last one's alone."""
        name = phases[number].name
        if name in ("begin", "end"):
            return self.is_first
        if name in ("head", "turn"):
            return self.is_last
        backwards = [index for index, phase in enumerate(phases) if phase.name == "backward"]
        return self.is_last or name != "reduce" or not backwards or number > backwards[0]
