"""Memory of a worker of a 3D layout: its stage's share of the model, and the micro batches that are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.engines.windows import WINDOW, windows
from rapidformer_templates.parallel.stages import cut
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

    @cached_property
    def parameters(self) -> dict[str, Facts]:
        """Its parameters by whole-model name.

        Raises:
            ModelError: the model cannot be cut or divided in this way.
        """
        local = self.model.local_parameters(self.layout.tensor)
        if self.layout.pipeline == 1:
            return local
        begin = sum(self._sizes[: self.rank])
        mine = [block for block, (_, place) in self.model.blocks.items() if begin <= place < begin + self.blocks]
        place = "first" if self.is_first else "last" if self.is_last else "middle"
        return {
            name: facts
            for name, facts in local.items()
            if self._in_blocks(name, mine) or (self.model.block_of(name) is None and place in self._places(name))
        }

    def _places(self, name: str) -> frozenset[str]:
        """The ends of the pipeline that have a parameter, under any of its names."""
        return frozenset().union(*(self.model.ends.get(other, frozenset()) for other in self.model.names_of(name)))

    @staticmethod
    def _in_blocks(name: str, blocks: list[str]) -> bool:
        return any(name.startswith(f"{block}.") for block in blocks)

    @cached_property
    def _sizes(self) -> list[int]:
        """Blocks of each stage, as the engine cuts them: by the number of parameters."""
        ends = {name: self._places(name) for name in self.model.parameters if self.model.block_of(name) is None}
        front, back = (
            float(sum(self.model.parameters[name].count for name, places in ends.items() if place in places))
            for place in ("first", "last")
        )
        blocks = [float(count) for count in self.model.block_elements.values()]
        return cut(front, blocks, back, self.layout.pipeline)

    @property
    def blocks(self) -> int:
        """How many it has."""
        return self._sizes[self.rank] if self.layout.pipeline > 1 else sum(self.model.depths.values())

    @property
    def in_flight(self) -> int:
        """Micro batches whose activations it holds at a time: 1F1B (Narayanan et al., 2021, section 2.2)."""
        return min(self.layout.pipeline - self.rank, self.layout.accumulation)

    def held(self, replica: int = 0) -> Held:
        """The states of a replica's worker; gradients when the last backward has ended."""
        count = sum(facts.count for facts in self.parameters.values())
        runs = self._runs(replica)
        gradients = FP32 * count
        if self.layout.partitioning == "zero-2" and self.layout.data > 1:
            gradients = FP32 * sum(window.share for window in self._windows())
        return Held(FP32 * count, gradients, MOMENTS * sum(runs) + COUNTER * len(runs))

    def _windows(self):  # type: ignore[no-untyped-def]
        return windows([(i, f.count) for i, f in reversed(list(enumerate(self.parameters.values())))], self.layout.data)

    def _runs(self, replica: int) -> list[int]:
        """Elements of each tensor that the optimizer of a replica's worker updates."""
        if self.layout.partitioning == "none" or self.layout.data == 1:
            return [facts.count for facts in self.parameters.values()]
        return [run.length for window in self._windows() for run, _ in window.owned(replica)]

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
        count = sum(facts.count for facts in self.parameters.values())
        return 2 * FP32 * min(WINDOW, count)

    def _has(self, phase: Phase) -> bool:
        if phase.name in ("head", "turn"):
            return self.is_last
        if phase.name in ("begin", "end"):
            return self.is_first
        return True
