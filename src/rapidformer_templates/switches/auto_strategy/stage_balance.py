"""``--pipeline-stages auto-memory``: cut a pipeline so that its largest stage needs as little memory as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.balance import balanced_cut, least_cost
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions, layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import of_stage, variant_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import ModelSource, Subject
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.stage_memory import stage_of_blocks
from rapidformer_templates.switches.auto_strategy.timing import GB

ALIKE = 0.02
"""Share of the memory. Cuts that differ by less count as equal. The one whose stage times are closest is chosen."""


@dataclass(frozen=True)
class StageBalance:
    """A cut, and what it changes.

    Attributes:
        sizes: blocks of each stage.
        needed: predicted bytes of a worker of each stage.
        by_parameters: blocks and bytes of each stage in the default cut.
        slower: relative increase in parameters of the largest stage over the default cut. A micro batch takes longer
            by about this share, because the other stages wait for the largest one.
    """

    sizes: tuple[int, ...]
    needed: tuple[int, ...]
    by_parameters: tuple[tuple[int, ...], tuple[int, ...]]
    slower: float

    def line(self) -> str:
        """Return a summary for people."""
        sizes, needed = self.by_parameters
        by_memory = (
            f"{_numbers(self.sizes)} blocks, at most {max(self.needed) / GB:.3g} GB per worker ({_in_gb(self.needed)})"
        )
        usual = f"by parameters {_numbers(sizes)}, {max(needed) / GB:.3g} GB ({_in_gb(needed)})"
        return (
            f"--pipeline-stages auto-memory: {by_memory}; {usual}; the largest stage has {self.slower:+.0%} parameters"
        )


def _numbers(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _in_gb(needed: Sequence[int]) -> str:
    return ", ".join(f"{size / GB:.3g}" for size in needed)


def balance_memory(model: ModelShapes, layout: Layout, setting: MemoryOptions, *, exact: bool = True) -> StageBalance:
    """Return the cut with the lowest peak memory. Among cuts with about the same peak, return the fastest.

    Raises:
        ModelError: the model cannot be cut into this many stages.
    """
    blocks, variant = sum(model.depths.values()), variant_of(layout, setting)
    if blocks < layout.pipeline:
        raise ModelError(f"{blocks} blocks cannot be cut into {layout.pipeline} stages", where="--pipeline-stages")

    @cache
    def predicted(stage: int, begin: int, end: int) -> int:
        part = stage_of_blocks(model, layout.of_states, stage, setting, (begin, end))
        return of_stage(part, variant, layout.accumulation, exact=exact).total

    def needed(stage: int, begin: int, end: int) -> int:
        if model.repeats:  # the position of a run of equal blocks does not matter
            begin, end = stage, stage + end - begin
        return predicted(stage, begin, end)

    limit = least_cost(blocks, layout.pipeline, needed) * (1 + ALIKE)
    elements = model.stage_elements
    chosen = balanced_cut(*elements, layout.pipeline, allowed=lambda *stage: needed(*stage) <= limit)
    usual = model.stage_sizes(layout.pipeline)
    return StageBalance(
        tuple(chosen),
        tuple(needed(*stage) for stage in _stages(chosen)),
        (tuple(usual), tuple(needed(*stage) for stage in _stages(usual))),
        _largest(chosen, *elements) / _largest(usual, *elements) - 1,
    )


def _stages(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (stage, its first block, the first block after it) for each stage."""
    return [(stage, sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(len(sizes))]


def _largest(sizes: Sequence[int], front: float, blocks: Sequence[float], back: float) -> float:
    """Elements of the largest stage."""
    elements = [sum(blocks[begin:end]) for _, begin, end in _stages(sizes)]
    elements[0] += front
    elements[-1] += back
    return max(elements)


def with_stages_by_memory(config: RunConfig, environment: Environment, source: ModelSource | None = None) -> RunConfig:
    """Return the configuration with the stages that ``auto-memory`` chooses, and a line that explains the choice.

    Raises:
        Refused: the flags break rules.
        ModelError: the model cannot be built or cut.
    """
    plan = resolve(config, environment)
    subject = Subject(config, plan, gpu=environment.device != "cpu", source=source)
    balance = balance_memory(subject.shapes, layout_of(plan), memory_options_of(plan, subject.shapes.width))
    chosen = config.replace("auto-memory", pipeline_stages=_numbers(balance.sizes))
    return replace(chosen, chosen=(*chosen.chosen, balance.line()))
