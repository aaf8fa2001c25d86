"""Pipeline parallelism: give each worker of a group a run of consecutive blocks."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._layout_rules import LAYOUT_RULES
from rapidformer_templates.switches._switch import Stage, Switch


@dataclass(frozen=True)
class PipelineParallelFlags:
    """Acceleration"""

    pipeline_model_parallel_size: int = flag(1, "stages that the blocks are cut into", metavar="N", minimum=1)
    virtual_pipeline_size: int = flag(
        1, "stages that each worker of a pipeline has: above 1 they are interleaved", metavar="N", minimum=1
    )
    pipeline_stages: str | None = flag(
        None, "blocks of each stage, such as 3,5 (default: by parameters, embedding and head counted)", metavar="A,B"
    )


SWITCH = Switch(
    name="pipeline-parallel",
    summary="Cut the blocks into N consecutive stages, one a worker.",
    source="[R, M]",
    stage=Stage.PARTITION,
    options=PipelineParallelFlags,
    active=lambda options, sizes: options.pipeline_model_parallel_size > 1,
    on={"pipeline_model_parallel_size": 2},
    off={"pipeline_model_parallel_size": 1},
    templates=("Trainer",),
    engine="rapidformer_templates.engines.pipeline:PipelineEngine",
    transform="rapidformer_templates.parallel.cutting:cut_into_stages",
    receipt=("parameter_bytes",),
    rules=LAYOUT_RULES,
)
