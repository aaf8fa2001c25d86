"""Memory beyond FSDP's shards in each phase of a micro batch: whole parameters, whole gradients, and transfers.

A block's parameters arrive in one buffer and are copied out of it. Its gradients are copied into one buffer and sent.
The root's parameters (embeddings, last norm, head) are whole from beginning to end. So are its gradients, which are
sent last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.planning.optimizer_states import FP32
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.setting import MemoryOptions
from rapidformer_templates.switches.auto_strategy.stage_memory import MemorySnapshot
from rapidformer_templates.switches.auto_strategy.trace import Phase


@dataclass(frozen=True)
class Sharded:
    """A micro batch of a model whose states FSDP shards.

    Attributes:
        width: bytes per element of the whole parameters, and of their gradients as the backward produces them.
    """

    model: ModelShapes
    layout: Layout
    setting: MemoryOptions
    width: int
    phases: Sequence[Phase]

    def moments(self) -> Iterator[MemorySnapshot]:
        """Yield the candidates for the peak. With accumulation, they come from the last micro batch."""
        # Before they are copied out of their buffer. gloo copies the buffer once more.
        yield MemorySnapshot(
            0, self._gradients(0, 0), (2 if self.setting.gpu else 3) * self.width * self.model.outside_blocks
        )
        before = 0
        for number, phase in enumerate(self.phases):
            yield from self._of(phase, before, self._gathered(number))
            before = phase.finished
        # While the root's gradients are sent, FSDP's loop over the gradients still holds the last one.
        outside = [facts.count for name, facts in self.model.parameters.items() if not self.model.block_of(name)]
        width = FP32 if self._adds_up else self.width
        leaving = 2 * FP32 * sum(outside) + width * sum(outside[-1:])
        yield MemorySnapshot(self.phases[-1].end, self._to_fp32(before) // self.layout.shares, leaving)

    def _of(self, phase: Phase, before: int, gathered: int) -> Iterator[MemorySnapshot]:
        """``before``: bytes of gradients finished when the phase began. ``gathered``: bytes of whole parameters."""
        # The gradients of the root that are finished before those of the last block belong to the head.
        outside = min(before, self.phases[self._begins - 1].finished if self._backwards else 0)
        of_blocks = before - outside
        run = self._run  # sent while the next block computes
        leaving = run if of_blocks else 0
        yield MemorySnapshot(phase.peak_beside_earlier, self._gradients(outside, of_blocks), gathered + leaving)
        if phase.name != "backward":
            return
        if phase.blocks > 1:  # the last of the blocks that the phase represents
            others = phase.blocks - 1
            alive = phase.peak_beside_earlier - others * phase.kept_by_each
            earlier = of_blocks + (phase.finished - before) * others // phase.blocks
            yield MemorySnapshot(alive, self._gradients(outside, earlier), gathered + run)
        # Its gradients are in their buffer, which gloo copies once more. Its parameters have been freed.
        yield MemorySnapshot(
            phase.end, self._gradients(outside, phase.finished - outside), gathered - self._block + 2 * run
        )

    def _gathered(self, number: int) -> int:
        """Bytes of whole parameters in a phase: of the root, of the active block, and of the block that arrives."""
        if not self.setting.reshards:
            return self.width * sum(p.among(self.layout.experts).count for p in self.model.all_parameters.values())
        blocks = {"forward": 2, "end": 0}.get(self.phases[number].name, 1)
        if self._begins <= number < self._ends:  # after the last one, none arrives
            blocks = 2
        return self.width * self.model.outside_blocks + blocks * self._block

    def _gradients(self, outside: int, of_blocks: int) -> int:
        """Bytes of gradients, from the finished ones of root and blocks: whole gradients, and shards of the others."""
        of_blocks = self._to_fp32(of_blocks)
        shards = of_blocks // self.layout.shares
        if not self._adds_up:
            return outside + shards
        whole = FP32 * sum(p.among(self.layout.experts).count for p in self.model.parameters.values())
        return max(whole - of_blocks, 0) + shards

    def _to_fp32(self, gradients: int) -> int:
        return gradients * FP32 // self.width

    @property
    def _adds_up(self) -> bool:
        """Whether gradients of earlier micro batches are kept whole in the type of the sum."""
        return self.layout.accumulation > 1

    @cached_property
    def _block(self) -> int:
        """Bytes of a block's whole parameters."""
        return self.width * self.model.largest_block(self.layout.experts) if self.setting.reshards else 0

    @cached_property
    def _run(self) -> int:
        """Bytes of a block's gradients, in the type of the sum."""
        return FP32 * self.model.most_trained_in_a_block(self.layout.experts)

    @cached_property
    def _backwards(self) -> list[int]:
        return [number for number, phase in enumerate(self.phases) if phase.name == "backward"]

    @property
    def _begins(self) -> int:
        """Index of the first backward of a block."""
        return self._backwards[0] if self._backwards else 0

    @property
    def _ends(self) -> int:
        """Index of the last backward of a block."""
        return self._backwards[-1] if self._backwards else 0
