"""The switches that divide a model over workers, and the rules that several of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.planning.checks import PARTITIONING, needs_template
from rapidformer_templates.planning.plan import PARALLEL_ENGINE
from rapidformer_templates.planning.switch import Change, Example, Finding, Request, Rule, RuleList, add, replace
from rapidformer_templates.switches.layout.context_switch import CONTEXT_PARALLEL
from rapidformer_templates.switches.layout.expert_switch import EXPERT_PARALLEL
from rapidformer_templates.switches.layout.pipeline_switch import PIPELINE_PARALLEL
from rapidformer_templates.switches.layout.tensor_switch import SEQUENCE_PARALLEL, TENSOR_PARALLEL

PARALLEL = ("tensor-parallel", "context-parallel", "pipeline-parallel")
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT = "context_parallel_size"


def _parallel(request: Request) -> tuple[str, ...]:
    return tuple(name for name in PARALLEL if name in request.active)


def _smaller(name: str, size: int, fits: Callable[[int], bool]) -> tuple[Change, ...]:
    """Suggest the largest size above one and below ``size`` that fits, if there is one."""
    best = next((n for n in range(size - 1, 1, -1) if fits(n)), None)
    return (replace({name: best}),) if best else ()


LAYOUT_RULES = RuleList(
    [
        Rule(
            "RF003",
            "Tensor, context and pipeline parallelism need the Trainer template.",
            "the other templates keep the whole model and whole sequences in each worker",
            "[R]",
            needs_template(*PARALLEL),
            Example("--template Pretrainer --tensor-model-parallel-size 2 --world-size 2"),
            refusal="Tensor, context or pipeline parallelism in a Finetuner or a Pretrainer.",
        ),
    ]
)


@LAYOUT_RULES.add(
    "RF004",
    "With 3D parallelism only ZeRO-1, ZeRO-2 or the distributed optimizer partition the model's states; with "
    "context parallelism alone, FSDP does as well.",
    "the others shard or gather over all workers, but these have already divided the model or its sequences",
    "[R, M]",
    Example("--tensor-model-parallel-size 2 --fsdp-memory-optimization --world-size 4"),
    refusal="FSDP, ZeRO-3, OSS or SDP together with tensor, context or pipeline parallelism.",
)
def _few_partitions(request: Request) -> list[Finding]:
    parallel = _parallel(request)
    # Context parallelism alone leaves all parameters to the engine of another switch.
    only_context = parallel == ("context-parallel",)
    return [
        Finding(
            f"{switch.name} does not work together with {' and '.join(parallel)}",
            request.asked_for(switch.name, *parallel),
            switches=(switch.name, *parallel),
        )
        for switch in request.of_family(PARTITIONING)
        if not (switch.divides_copies and (only_context or switch.engine in (None, PARALLEL_ENGINE)))
    ]


@LAYOUT_RULES.add(
    "RF009",
    "Tensor × context × pipeline × data is the number of workers.",
    "each worker holds one tensor shard of one pipeline stage of one replica, for one part of its sequences",
    "[M]",
    Example("--tensor-model-parallel-size 3 --world-size 4"),
    refusal="Sizes of tensor, context and pipeline parallelism whose product does not divide the workers.",
)
def _workers_divide(request: Request) -> list[Finding]:
    sizes = request.sizes
    world, divides = sizes.world, sizes.divides
    if world % divides == 0:
        return []
    context = f"context {sizes.context} × " if sizes.context > 1 else ""
    return [
        Finding(
            f"{world} worker{'s' if world > 1 else ''} cannot be divided into tensor {sizes.tensor} × {context}"
            f"pipeline {sizes.pipeline}",
            (*request.asked_for(*_parallel(request)), f"{world} workers in all"),
            switches=_parallel(request),
            changes=(
                *_smaller(TENSOR, sizes.tensor, lambda n: world % (divides // sizes.tensor * n) == 0),
                *_smaller(CONTEXT, sizes.context, lambda n: world % (divides // sizes.context * n) == 0),
                *_smaller(PIPELINE, sizes.pipeline, lambda n: world % (divides // sizes.pipeline * n) == 0),
            ),
        )
    ]


def _blocks_divide(request: Request) -> list[Finding]:
    layers, sizes = request.model.num_layers, request.sizes
    if layers is None or sizes.pipeline == 1 or request.config.get("pipeline_stages") is not None:
        return []  # another rule checks stages that the user specifies, which may differ
    if sizes.pipeline < layers and layers % sizes.pipeline == 0:
        return []
    divides = sizes.divides
    stages = sizes.pipeline * int(request.config.get("virtual_pipeline_size"))
    uneven = ",".join(map(str, balanced_cut(0, [1] * layers, 0, stages))) if stages <= layers else None
    return [
        Finding(
            f"{layers} blocks cannot be cut into {sizes.pipeline} stages of more than one block and equal size",
            request.asked_for("pipeline-parallel"),
            switches=("pipeline-parallel",),
            changes=(
                *_smaller(
                    PIPELINE,
                    sizes.pipeline,
                    lambda n: n < layers and layers % n == 0 and sizes.world % (divides // sizes.pipeline * n) == 0,
                ),
                *((add({"pipeline_stages": uneven}, "blocks of each stage"),) if uneven else ()),
            ),
        )
    ]


def _matrices_divide(request: Request) -> list[Finding]:
    model, sizes = request.model, request.sizes
    named = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_key_value_heads,
        "hidden size": model.hidden_size,
    }
    stated = {name: size for name, size in named.items() if size is not None}
    uneven = [f"{name} {size}" for name, size in stated.items() if size % sizes.tensor]
    if not uneven:
        return []
    return [
        Finding(
            f"tensor size {sizes.tensor} does not divide {', '.join(uneven)}",
            request.asked_for("tensor-parallel"),
            switches=("tensor-parallel",),
            changes=_smaller(
                TENSOR,
                sizes.tensor,
                lambda n: (
                    not any(size % n for size in stated.values())
                    and sizes.world % (sizes.divides // sizes.tensor * n) == 0
                ),
            ),
        )
    ]


@LAYOUT_RULES.add(
    "RF010",
    "The pipeline size divides the number of blocks and is below it; the tensor size divides heads and hidden size.",
    "stages and shards of unequal size would wait for the largest one, or could not be made at all; "
    "--pipeline-stages asks for unequal stages on purpose",
    "[M]",
    Example("--pipeline-model-parallel-size 4 --num-layers 6 --world-size 4"),
    refusal="A pipeline size or a tensor size that does not divide the model.",
)
def _model_divides(request: Request) -> list[Finding]:
    return [*_blocks_divide(request), *_matrices_divide(request)]


SWITCHES = (
    *(
        dataclasses.replace(switch, rules=(*LAYOUT_RULES, *switch.rules))
        for switch in (TENSOR_PARALLEL, CONTEXT_PARALLEL, PIPELINE_PARALLEL)
    ),
    SEQUENCE_PARALLEL,
    EXPERT_PARALLEL,
)
