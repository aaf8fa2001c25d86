"""Memory of a worker of a 3D layout: its stage's share of the model, and the micro batches that are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.engines.parallel.windows import WINDOW, Window
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.model_shapes import Coordinates, ModelShapes, Variant
from rapidformer_templates.switches.auto_strategy.optimizer_states import FP32, Facts, runs
from rapidformer_templates.switches.auto_strategy.setting import Setting
from rapidformer_templates.switches.auto_strategy.state_bytes import Held
from rapidformer_templates.switches.auto_strategy.trace import Phase, Trace


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
    sizes = [0] if layout.pipeline == 1 else model.stage_sizes(layout.pipeline)
    middle = {sizes[rank]: rank for rank in range(layout.pipeline - 2, 0, -1)}
    return [Stage(model, layout, rank, setting) for rank in sorted({0, *middle.values(), layout.pipeline - 1})]


class Stage:
    """The part of the model that a pipeline rank has, as its tensor-parallel group shares it.

    Attributes:
        rank: from 0.
        coordinates: of the worker; among those who share the blocks' matrices, the first has most.
    """

    def __init__(self, model: ModelShapes, layout: Layout, rank: int, setting: Setting, peer: int = 0) -> None:
        self.model, self.layout, self.rank, self.setting = model, layout, rank, setting
        self.coordinates = Coordinates(layout.tensor, layout.pipeline, rank, peer)

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
        if self.layout.pipeline == 1:
            return sum(self.model.depths.values())
        return self.model.stage_sizes(self.layout.pipeline)[self.rank]

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
        trace = self._trace(variant, exact=exact)
        given, kept = 0, trace.kept
        if not self.is_first:  # a hidden state came in the place of the embedding
            given, kept = trace.hidden - trace.phases[0].end, kept + trace.hidden - trace.phases[0].kept
        others = (self.in_flight - 1) * kept
        if variant.offload:
            given = 0 if self.is_first else trace.hidden  # it stays, and the embedding does not
            others -= max(self.in_flight - 2, 0) * trace.kept_by_last  # only the newest forward's has not been sent yet
        if layout.pipeline > 1:  # one is on its way each way
            others += (1 if self.is_last or self.is_first else 2) * trace.hidden
        moments = []
        for phase in trace.phases:
            if self._has(phase):
                alone = phase.peak_without_gradients + given + others
                moments.append(self._moment(phase, alone, held))
        return [*moments, *self._exchange(others, held)]

    def sent(self, variant: Variant, *, exact: bool) -> int:
        """Bytes of its micro batches in flight that are on the host at a time."""
        trace = self._trace(variant, exact=exact)
        last = trace.kept_by_last if variant.offload and self.in_flight > 1 else 0  # goes where another forward comes
        return self.in_flight * (trace.sent + last)

    def _trace(self, variant: Variant, *, exact: bool) -> Trace:
        return self.model.trace(variant, self.blocks if self.layout.pipeline > 1 else None, exact=exact)

    def _moment(self, phase: Phase, activations: int, held: Held) -> Moment:
        unfinished = phase.peak - phase.peak_without_gradients
        if not self._sums_early:
            return Moment(activations, held.gradients if self.layout.accumulation > 1 else unfinished, 0)
        added_up = held.gradients if self.layout.accumulation > 1 else 0
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

    def _has(self, phase: Phase) -> bool:
        if phase.name in ("head", "turn"):
            return self.is_last
        if phase.name in ("begin", "end"):
            return self.is_first
        return True
