"""The switches of tensor and sequence parallelism: shard the matrices of a block, and the sequence between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.checks import shown
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    add,
)
from rapidformer_templates.switches.layout.tensor_styles import KNOWN, PLANS, styles_in_transformers


@dataclass(frozen=True)
class TensorParallelFlags:
    """Acceleration"""

    tensor_model_parallel_size: int = flag(1, "workers that share each block's matrices", metavar="N", minimum=1)


TENSOR_RULES = RuleList()


@TENSOR_RULES.add(
    "RF064",
    "Tensor parallelism needs a plan of the architecture.",
    "a plan says which matrices are divided along which dimension; a guess would compute something else",
    "[transformers]",
    Example("--tensor-model-parallel-size 2 --model-type bloom --world-size 2"),
    refusal="Tensor parallelism for an architecture without a tensor plan, or with a plan of unknown styles.",
)
def _has_tensor_plan(request: Request) -> list[Finding]:
    kind = request.model.model_type
    if kind is None or kind in PLANS:
        return []
    styles = styles_in_transformers(kind)
    if styles is None:
        return []  # the architecture comes from the model's own code, so the model is checked once it is built
    unknown = sorted(styles - KNOWN)
    if styles and not unknown:
        return []
    message = f"the tensor plan of {kind} has styles that this version does not know: {', '.join(unknown)}"
    return [
        Finding(
            message if styles else f"{kind} has no tensor plan",
            (*request.asked_for("tensor-parallel"), f"architecture {kind}"),
            switches=("tensor-parallel",),
        )
    ]


def _notes(request: Request) -> Sequence[str]:
    sizes = request.sizes
    if sizes.tensor <= sizes.local_world:
        return ()
    return (f"tensor-parallel: groups of {sizes.tensor} span nodes of {sizes.local_world} workers, which is slow",)


def _tensor_acted(measured: Measured) -> str | None:
    size, measured_size = measured.plan.sizes.tensor, measured["tensor_parallel_size"]
    if measured_size == size and any(measured.all("divided_elements")):
        return None
    return f"matrices divided over {size} workers were expected; they are divided over {measured_size or 1}"


TENSOR_PARALLEL = Switch(
    name="tensor-parallel",
    summary="Shard the matrices of each block over N workers.",
    source="[R, M]",
    precedence=Precedence.TENSOR,
    options=TensorParallelFlags,
    on={"tensor_model_parallel_size": 2},
    predicts=Prediction(
        dict.fromkeys(("parameters", "gradients", "optimizer"), "a share of each matrix")
        | {
            "activations": "a share of each block's and of the logits",
            "time": "sums over the group",
        }
    ),
    templates=("Trainer",),
    notes=_notes,
    sizes={"tensor": "tensor_model_parallel_size"},
    engine="rapidformer_templates.engines.parallel.engine:ParallelEngine",
    builds_in_shares=True,
    master_weights=True,
    transform="rapidformer_templates.switches.layout.tensor:divide_matrices",
    receipt_hooks="rapidformer_templates.switches.layout.tensor:TensorDivision",
    receipt=("parameter_bytes", "parameter_bytes_whole", "tensor_parallel_size", "logits_columns"),
    acted=_tensor_acted,
    rules=tuple(TENSOR_RULES),
)


@dataclass(frozen=True)
class SequenceParallelFlags:
    """Acceleration"""

    sequence_parallel: bool = flag(
        False, "shard norms and dropout along the sequence, over the tensor-parallel workers"
    )


SEQUENCE_RULES = RuleList()


@SEQUENCE_RULES.add(
    "RF014",
    "Sequence parallelism needs tensor parallelism.",
    "it shards over the workers of a tensor-parallel group; a group of one has nothing to divide",
    "[M]",
    Example("--sequence-parallel --world-size 2"),
    refusal="Sequence parallelism without tensor parallelism.",
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


def _sequence_acted(measured: Measured) -> str | None:
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
    receipt_hooks="rapidformer_templates.switches.layout.tensor:TensorDivision",
    receipt=("sequence_tokens",),
    acted=_sequence_acted,
    rules=tuple(SEQUENCE_RULES),
)
