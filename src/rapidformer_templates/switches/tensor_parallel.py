"""Tensor parallelism: shard each matrix of a block over the workers of a group."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._layout_rules import LAYOUT_RULES
from rapidformer_templates.switches._switch import Stage, Switch


@dataclass(frozen=True)
class TensorParallelFlags:
    """Acceleration"""

    tensor_model_parallel_size: int = flag(1, "workers that share each block's matrices", metavar="N", minimum=1)


SWITCH = Switch(
    name="tensor-parallel",
    summary="Shard the matrices of each block over N workers.",
    source="[R, M]",
    stage=Stage.TENSOR,
    options=TensorParallelFlags,
    active=lambda options, sizes: options.tensor_model_parallel_size > 1,
    on={"tensor_model_parallel_size": 2},
    off={"tensor_model_parallel_size": 1},
    templates=("Trainer",),
    rules=LAYOUT_RULES,
    available=False,
)
