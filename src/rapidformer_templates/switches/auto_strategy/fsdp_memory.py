"""What lies beside FSDP's shards in each phase of a micro batch: whole parameters, whole gradients, and what travels.

A block's parameters arrive in one run and are copied out of it; its gradients are copied into one run and leave. The
root's (embeddings, last norm, head) are whole from the beginning to the end, and so are its gradients: they leave
last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.optimizer_states import FP32
from rapidformer_templates.switches.auto_strategy.setting import Setting
from rapidformer_templates.switches.auto_strategy.stage_memory import Moment
from rapidformer_templates.switches.auto_strategy.trace import Phase


@dataclass(frozen=True)
class Sharded:
    """A micro batch of a model whose states FSDP shards.

    Attributes:
        width: bytes of a number of the whole parameters, and of their gradients as they come.
    """

    model: ModelShapes
    layout: Layout
    setting: Setting
    width: int
    phases: Sequence[Phase]

    def moments(self) -> Iterator[Moment]:
        """Where most may be alive; where gradients are added up, in the last micro batch."""
        # Until they are copied out of their run; gloo copies the run once more.
        yield Moment(0, self._gradients(0, 0), (2 if self.setting.gpu else 3) * self.width * self.model.outside_blocks)
        before = 0
        for number, phase in enumerate(self.phases):
            yield from self._of(phase, before, self._gathered(number))
            before = phase.finished
        yield self._root_leaves(before)

    def _of(self, phase: Phase, before: int, gathered: int) -> Iterator[Moment]:
        """``before``: bytes of the gradients that were finished when it began; ``gathered``: of whole parameters."""
        outside = min(before, self._of_head)
        of_blocks = before - outside
        run = self._run  # leaves while the next block works
        leaving = run if of_blocks else 0
        yield Moment(phase.peak_beside_earlier, self._gradients(outside, of_blocks), gathered + leaving)
        if phase.name != "backward":
            return
        if phase.blocks > 1:  # the last one of those that it stands for
            others = phase.blocks - 1
            alive = phase.peak_beside_earlier - others * phase.kept_by_each
            earlier = of_blocks + (phase.finished - before) * others // phase.blocks
            yield Moment(alive, self._gradients(outside, earlier), gathered + run)
        # Its own have gone into their run, which gloo copies once more; its parameters have been given up.
        yield Moment(phase.end, self._gradients(outside, phase.finished - outside), gathered - self._block + 2 * run)

    def _root_leaves(self, finished: int) -> Moment:
        """FSDP's loop over the gradients holds the last one while their run is on its way."""
        outside = [facts.count for name, facts in self.model.parameters.items() if not self.model.block_of(name)]
        width = FP32 if self._adds_up else self.width
        leaving = 2 * FP32 * sum(outside) + width * sum(outside[-1:])
        return Moment(self.phases[-1].end, self._to_fp32(finished) // self.layout.shares, leaving)

    def _gathered(self, number: int) -> int:
        """Bytes of whole parameters in a phase: of the root, of the block at work, and of the one that arrives."""
        if not self.setting.reshards:
            return self.width * sum(p.among(self.layout.experts).count for p in self.model.all_parameters.values())
        blocks = {"forward": 2, "end": 0}.get(self.phases[number].name, 1)
        if self._begins <= number < self._ends:  # after the last one none arrives
            blocks = 2
        return self.width * self.model.outside_blocks + blocks * self._block

    def _gradients(self, outside: int, of_blocks: int) -> int:
        """Of gradients that are finished, of the root and of blocks: those whole, and the shards of the others."""
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
        """Whether gradients of earlier micro batches lie whole in the type of the sum."""
        return self.layout.accumulation > 1

    @cached_property
    def _block(self) -> int:
        """Bytes of a block's whole parameters."""
        return self.width * self.model.largest_block(self.layout.experts) if self.setting.reshards else 0

    @cached_property
    def _run(self) -> int:
        """Bytes of a block's gradients, in the type of the sum."""
        return FP32 * self.model.most_trained_in_a_block(self.layout.experts)

    @property
    def _of_head(self) -> int:
        """Bytes of the root's gradients that are finished before those of the last block."""
        return self.phases[self._begins - 1].finished if self._backwards else 0

    @cached_property
    def _backwards(self) -> list[int]:
        return [number for number, phase in enumerate(self.phases) if phase.name == "backward"]

    @property
    def _begins(self) -> int:
        """The number of the first backward of a block."""
        return self._backwards[0] if self._backwards else 0

    @property
    def _ends(self) -> int:
        """The number of the last one."""
        return self._backwards[-1] if self._backwards else 0
