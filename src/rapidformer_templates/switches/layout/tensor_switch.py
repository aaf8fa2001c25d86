"""The switches of tensor and sequence parallelism: shard the matrices of a block, and the sequence between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.checks import needs, shown
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
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


@TENSOR_RULES.add("RF064", "[transformers]", "--tensor-model-parallel-size 2 --model-type bloom --world-size 2")
def _has_tensor_plan(request: Request) -> Iterator[Finding]:
    """Tensor parallelism needs a plan of the architecture.

    Why: a plan says which matrices are divided along which dimension; a guess would compute something else.
    """
    kind = request.model.model_type
    styles = None if kind is None or kind in PLANS else styles_in_transformers(kind)
    if styles is None:
        return  # an architecture of the model's own code is checked once the model is built
    unknown = ", ".join(sorted(styles - KNOWN))
    if unknown or not styles:
        what = f"the tensor plan of {kind} has styles that this version does not know: {unknown}"
        flags = (*request.asked_for("tensor-parallel"), f"architecture {kind}")
        yield Finding(what if styles else f"{kind} has no tensor plan", flags, switches=("tensor-parallel",))


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


@SEQUENCE_RULES.add("RF014", "[M]", "--sequence-parallel --world-size 2")
def _needs_tensor_parallel(request: Request) -> list[Finding]:
    """Sequence parallelism needs tensor parallelism.

    Why: it shards over the workers of a tensor-parallel group; a group of one has nothing to divide.
    """
    return needs(request, "sequence-parallel", "tensor-parallel", add({"tensor_model_parallel_size": 2}))


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
