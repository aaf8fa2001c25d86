"""Sequence parallelism: shard what tensor parallelism leaves whole, along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.planning.changes import add
from rapidformer_templates.planning.checks import shown
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Rule,
    Switch,
)


@dataclass(frozen=True)
class SequenceParallelFlags:
    """Acceleration"""

    sequence_parallel: bool = flag(
        False, "shard norms and dropout along the sequence, over the tensor-parallel workers"
    )


def _needs_tensor_parallel(request: Request) -> list[Finding]:
    if "tensor-parallel" in request.active:
        return []
    return [
        Finding(
            "sequence-parallel needs a tensor size above 1",
            request.asked("sequence_parallel", "tensor_model_parallel_size"),
            switches=("sequence-parallel",),
            changes=(add({"tensor_model_parallel_size": 2}),),
        )
    ]


def _acted(measured: Measured) -> str | None:
    tokens = measured.all("sequence_tokens")
    if any(own < whole or whole == 1 for own, whole in tokens):
        return None
    return f"a part of each sequence on each worker was expected; [tokens held, in all] are {shown(tokens)}"


SEQUENCE_PARALLEL = Switch(
    name="sequence-parallel",
    summary="Shard norms and dropout along the sequence, over the tensor-parallel workers.",
    source="[M]",
    precedence=Precedence.TENSOR,
    options=SequenceParallelFlags,
    predicts=Prediction({"activations": "norms and dropout cut along the sequence"}),
    receipt_hooks="rapidformer_templates.switches.tensor_parallel.receipt:TensorDivision",
    receipt=("sequence_tokens",),
    acted=_acted,
    rules=(
        Rule(
            "RF014",
            "Sequence parallelism needs tensor parallelism.",
            "it shards over the workers of a tensor-parallel group; a group of one has nothing to divide",
            "[M]",
            _needs_tensor_parallel,
            Example("--sequence-parallel --world-size 2"),
            refusal="Sequence parallelism without tensor parallelism.",
        ),
    ),
)
