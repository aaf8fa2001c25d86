"""Memory of a worker of a 3D layout: its stage's share of the model, and the micro batches that are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.engines.windows import WINDOW, Window, windows
from rapidformer_templates.planner.layouts import Layout
from rapidformer_templates.planner.model_shapes import ModelShapes, Variant
from rapidformer_templates.planner.states import COUNTER, FP32, MOMENTS, Facts, Held
from rapidformer_templates.planner.trace import Phase


@dataclass(frozen=True)
class Moment:
    """Bytes beside parameters and optimizer state at a moment."""

    activations: int
    gradients: int
    buffers: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.buffers


def telling_stages(model: ModelShapes, layout: Layout) -> list[Stage]:
    """The stages among which the one is that needs most: of equal stages, the first holds most micro batches.

    Raises:
        ModelError: the model cannot be cut in this way.
    """
    sizes = [0] if layout.pipeline == 1 else model.stage_sizes(layout.pipeline)
    middle = {sizes[rank]: rank for rank in range(layout.pipeline - 2, 0, -1)}
    return [Stage(model, layout, rank) for rank in sorted({0, *middle.values(), layout.pipeline - 1})]


class Stage:
    """The part of the model that a pipeline rank has, as its tensor-parallel group shares it.

    Attributes:
        rank: from 0.
    """

    def __init__(self, model: ModelShapes, layout: Layout, rank: int) -> None:
        self.model, self.layout, self.rank = model, layout, rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.layout.pipeline - 1

    @property
    def parameters(self) -> list[Facts]:
        """Its parameters.

        Raises:
            ModelError: the model cannot be cut or divided in this way.
        """
        return self.model.stage_parameters(self.layout.tensor, self.layout.pipeline, self.rank)

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
        count = sum(facts.count for facts in self.parameters)
        runs = self._runs(replica)
        gradients = FP32 * count
        if self.layout.partitioning == "zero-2" and self.layout.data > 1:
            gradients = FP32 * sum(window.share for window in self._windows)
        return Held(FP32 * count, gradients, MOMENTS * sum(runs) + COUNTER * len(runs))

    @cached_property
    def _windows(self) -> list[Window]:
        return windows([(i, f.count) for i, f in reversed(list(enumerate(self.parameters)))], self.layout.data)

    def _runs(self, replica: int) -> list[int]:
        """Elements of each tensor that the optimizer of a replica's worker updates."""
        if self.layout.partitioning == "none" or self.layout.data == 1:
            return [facts.count for facts in self.parameters]
        return [run.length for window in self._windows for run, _ in window.owned(replica)]

    def moments(self, variant: Variant, *, exact: bool) -> list[Moment]:
        """What lies beside the states, phase by phase, when most micro batches are in flight, and in the update."""
        layout, held = self.layout, self.held()
        trace = self.model.trace(variant, self.blocks if layout.pipeline > 1 else None, exact=exact)
        begin = trace.phases[0].end
        kept = trace.kept
        before = self.in_flight - 1
        found = []
        whole = layout.accumulation > 1
        for phase in trace.phases:
            if not self._has(phase):
                continue
            activations = phase.peak_without_gradients + before * kept
            apart = phase.peak - phase.peak_without_gradients
            if layout.pipeline > 1:
                activations += 2 * begin  # what came from one neighbour, and what goes to the other
            if layout.partitioning == "zero-2" and layout.data > 1:
                found.append(Moment(activations, held.gradients, self._window_bytes))
            else:
                found.append(Moment(activations, held.gradients if whole else apart, 0))
        shares = held.gradients // layout.data if layout.partitioning == "zero-1" else 0
        found.append(Moment(0, held.gradients, shares + self._window_bytes if layout.data > 1 else 0))
        return found

    @property
    def _window_bytes(self) -> int:
        """One window that is being filled while another is on its way."""
        count = sum(facts.count for facts in self.parameters)
        return 2 * FP32 * min(WINDOW, count)

    def _has(self, phase: Phase) -> bool:
        if phase.name in ("head", "turn"):
            return self.is_last
        if phase.name in ("begin", "end"):
            return self.is_first
        return True
