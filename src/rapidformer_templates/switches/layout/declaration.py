"""The switches that divide a model over workers, and the rules that several of them share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from rapidformer_templates.errors import counted
from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.planning.checks import PARTITIONING, nearest_divisor, needs_template
from rapidformer_templates.planning.plan import PARALLEL_ENGINE
from rapidformer_templates.planning.switch import Change, Finding, Request, RuleList, add
from rapidformer_templates.switches.layout.context_switch import CONTEXT_PARALLEL
from rapidformer_templates.switches.layout.expert_switch import EXPERT_PARALLEL
from rapidformer_templates.switches.layout.pipeline_switch import PIPELINE_PARALLEL
from rapidformer_templates.switches.layout.tensor_switch import SEQUENCE_PARALLEL, TENSOR_PARALLEL

PARALLEL = ("tensor-parallel", "context-parallel", "pipeline-parallel")
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT = "context_parallel_size"


def _parallel(request: Request) -> tuple[str, ...]:
    return tuple(name for name in PARALLEL if name in request.active)


def _smaller(request: Request, name: str, fits: Callable[[int], bool]) -> tuple[Change, ...]:
    """Suggest the largest smaller size of a dimension that fits and divides the workers, if there is one."""
    size, sizes = request.config.get(name), request.sizes
    others = sizes.divides // size
    return nearest_divisor(name, size, lambda n: fits(n) and sizes.world % (n * others) == 0)


LAYOUT_RULES = RuleList()


@LAYOUT_RULES.add("RF003", "[R]", "--template Pretrainer --tensor-model-parallel-size 2 --world-size 2")
def _only_in_trainer(request: Request) -> Iterator[Finding]:
    """Tensor, context and pipeline parallelism need the Trainer template.

    Why: the other templates keep the whole model and whole sequences in each worker.
    """
    return needs_template(request, *PARALLEL)


@LAYOUT_RULES.add("RF004", "[R, M]", "--tensor-model-parallel-size 2 --fsdp-memory-optimization --world-size 4")
def _few_partitions(request: Request) -> Iterator[Finding]:
    """With 3D parallelism only ZeRO-1, ZeRO-2 or the distributed optimizer partition the model's states; with context
    parallelism alone, FSDP does as well.

    Why: the others shard or gather over all workers, but these have already divided the model or its sequences.
    """
    parallel = _parallel(request)
    # Context parallelism alone leaves all parameters to the engine of another switch.
    only_context = parallel == ("context-parallel",)
    for switch in request.of_family(PARTITIONING):
        if not (switch.divides_copies and (only_context or switch.engine in (None, PARALLEL_ENGINE))):
            names, others = (switch.name, *parallel), " and ".join(parallel)
            yield Finding(f"{switch.name} does not work together with {others}", request.asked_for(*names), names)


@LAYOUT_RULES.add("RF009", "[M]", "--tensor-model-parallel-size 3 --world-size 4")
def _workers_divide(request: Request) -> Iterator[Finding]:
    """Tensor × context × pipeline × data is the number of workers.

    Why: each worker holds one tensor shard of one pipeline stage of one replica, for one part of its sequences.
    """
    sizes, names = request.sizes, _parallel(request)
    if sizes.world % sizes.divides:
        layout = (
            f"tensor {sizes.tensor} × {f'context {sizes.context} × ' * (sizes.context > 1)}pipeline {sizes.pipeline}"
        )
        message = f"{counted(sizes.world, 'worker')} cannot be divided into {layout}"
        changes = (_smaller(request, name, lambda n: True) for name in (TENSOR, CONTEXT, PIPELINE))
        flags = (*request.asked_for(*names), f"{sizes.world} workers in all")
        yield Finding(message, flags, switches=names, changes=tuple(itertools.chain(*changes)))


def _blocks_divide(request: Request) -> Iterator[Finding]:
    layers, sizes = request.model.num_layers, request.sizes
    if layers is None or sizes.pipeline == 1 or request.config.get("pipeline_stages") is not None:
        return  # another rule checks stages that the user specifies, which may differ
    if sizes.pipeline >= layers or layers % sizes.pipeline:
        stages = sizes.pipeline * int(request.config.get("virtual_pipeline_size"))
        changes = _smaller(request, PIPELINE, lambda n: n < layers and layers % n == 0)
        if stages <= layers:
            uneven = ",".join(map(str, balanced_cut(0, [1] * layers, 0, stages)))
            changes += (add({"pipeline_stages": uneven}, "blocks of each stage"),)
        message = f"{layers} blocks cannot be cut into {sizes.pipeline} stages of more than one block and equal size"
        yield Finding(message, request.asked_for("pipeline-parallel"), ("pipeline-parallel",), changes)


def _matrices_divide(request: Request) -> Iterator[Finding]:
    model, tensor = request.model, request.sizes.tensor
    named = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_key_value_heads,
        "hidden size": model.hidden_size,
    }
    stated = {name: size for name, size in named.items() if size is not None}
    if uneven := [f"{name} {size}" for name, size in stated.items() if size % tensor]:
        changes = _smaller(request, TENSOR, lambda n: not any(size % n for size in stated.values()))
        message = f"tensor size {tensor} does not divide {', '.join(uneven)}"
        yield Finding(message, request.asked_for("tensor-parallel"), ("tensor-parallel",), changes)


@LAYOUT_RULES.add("RF010", "[M]", "--pipeline-model-parallel-size 4 --num-layers 6 --world-size 4")
def _model_divides(request: Request) -> Iterator[Finding]:
    """The pipeline size divides the number of blocks and is below it; the tensor size divides heads and hidden size.

    Why: stages and shards of unequal size would wait for the largest one, or could not be made at all;
    --pipeline-stages asks for unequal stages on purpose.
    """
    yield from _blocks_divide(request)
    yield from _matrices_divide(request)


SWITCHES = (
    *(
        dataclasses.replace(switch, rules=(*LAYOUT_RULES, *switch.rules))
        for switch in (TENSOR_PARALLEL, CONTEXT_PARALLEL, PIPELINE_PARALLEL)
    ),
    SEQUENCE_PARALLEL,
    EXPERT_PARALLEL,
)
