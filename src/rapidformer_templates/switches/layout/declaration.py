"""The switches that divide a model over workers: tensor, sequence, context and pipeline parallelism."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rapidformer_templates.errors import counted
from rapidformer_templates.planning import checks
from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.planning.changes import REPLACE, Change, add, drop, replace, spell
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import PARALLEL_ENGINE
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    RuleList,
    Switch,
)
from rapidformer_templates.switches.layout.expert_switch import EXPERT_PARALLEL
from rapidformer_templates.switches.layout.tensor_styles import KNOWN, PLANS, styles_in_transformers

PARALLEL = ("tensor-parallel", "context-parallel", "pipeline-parallel")
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT, KIND = "context_parallel_size", "context_parallel_kind"
AUTO_MEMORY = "auto-memory"
"""Replaces the list of blocks per stage. The planner then minimizes the memory of the stage that needs most."""

_PIPELINE = (PIPELINE, 2)


@dataclass(frozen=True)
class TensorParallelFlags:
    """Acceleration"""

    tensor_model_parallel_size: int = flag(1, "workers that share each block's matrices", metavar="N", minimum=1)


@dataclass(frozen=True)
class SequenceParallelFlags:
    """Acceleration"""

    sequence_parallel: bool = flag(
        False, "shard norms and dropout along the sequence, over the tensor-parallel workers"
    )


@dataclass(frozen=True)
class ContextParallelFlags:
    """Acceleration"""

    context_parallel_size: int = flag(1, "workers that share each sequence", metavar="N", minimum=1)
    context_parallel_kind: Literal["all-to-all", "ring"] | None = flag(
        None,
        "how attention sees whole sequences (default: all-to-all where the heads divide, else ring)",
        only_with=("context_parallel_size", 2),
    )


@dataclass(frozen=True)
class PipelineParallelFlags:
    """Acceleration"""

    pipeline_model_parallel_size: int = flag(1, "stages that the blocks are cut into", metavar="N", minimum=1)
    virtual_pipeline_size: int = flag(
        1, "stages per worker of a pipeline; above 1 they are interleaved", metavar="N", minimum=1, only_with=_PIPELINE
    )
    pipeline_stages: str | None = flag(
        None,
        "blocks of each stage, such as 3,5, or auto-memory for the lowest peak memory (default: by parameters, with "
        "embedding and head)",
        metavar="A,B|auto-memory",
        only_with=_PIPELINE,
    )


def _parallel(request: Request) -> tuple[str, ...]:
    return tuple(name for name in PARALLEL if name in request.active)


def _smaller(request: Request, name: str, fits: Callable[[int], bool]) -> tuple[Change, ...]:
    """Suggest the largest smaller size of a dimension that fits and divides the workers, if there is one."""
    size, sizes = request.config.get(name), request.sizes
    others = sizes.divides // size
    return checks.nearest_divisor(name, size, lambda n: fits(n) and sizes.world % (n * others) == 0)


def _stages(request: Request) -> int:
    return request.sizes.pipeline * int(request.config.get("virtual_pipeline_size"))


def _even_stages(layers: int, stages: int) -> str:
    """Return the value of --pipeline-stages that cuts the blocks as evenly as possible."""
    return ",".join(map(str, balanced_cut(0, [1] * layers, 0, stages)))


LAYOUT_RULES = RuleList()


@LAYOUT_RULES.add("RF003", "[R]", "--template Pretrainer --tensor-model-parallel-size 2 --world-size 2")
def _only_in_trainer(request: Request) -> Iterator[Finding]:
    """Tensor, context and pipeline parallelism need the Trainer template.

    Why: the other templates keep the whole model and whole sequences in each worker.
    """
    return checks.needs_template(request, *PARALLEL)


@LAYOUT_RULES.add("RF004", "[R, M]", "--tensor-model-parallel-size 2 --fsdp-memory-optimization --world-size 4")
def _few_partitions(request: Request) -> Iterator[Finding]:
    """With 3D parallelism only ZeRO-1, ZeRO-2 or the distributed optimizer partition the model's states; with context
    parallelism alone, FSDP does as well.

    Why: the others shard or gather over all workers, but these have already divided the model or its sequences.
    """
    parallel = _parallel(request)
    # Context parallelism alone leaves all parameters to the engine of another switch.
    only_context = parallel == ("context-parallel",)
    for switch in request.of_family(checks.PARTITIONING):
        if not (switch.divides_copies and (only_context or switch.engine in (None, PARALLEL_ENGINE))):
            names, others = (switch.name, *parallel), " and ".join(parallel)
            message = f"{switch.name} does not work together with {others}"
            changes = (_shard_inside(switch),) if Resource.PARAMETERS in switch.claims else ()
            yield Finding(message, request.asked_for(*names), names, changes)


def _shard_inside(switch: Switch) -> Change:
    """Shard the same states as a switch does, but inside the 3D layout."""
    on = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    return Change(spell(on), REPLACE, {**switch.off, **on}, note="shards optimizer state, gradients, parameters")


@LAYOUT_RULES.add("RF009", "[M]", "--tensor-model-parallel-size 3 --world-size 4")
def _workers_divide(request: Request) -> Iterator[Finding]:
    """Tensor × context × pipeline × data is the number of workers.

    Why: each worker holds one tensor shard of one pipeline stage of one replica, for one part of its sequences.
    """
    sizes, names = request.sizes, _parallel(request)
    if sizes.world % sizes.divides:
        context = f"context {sizes.context} × " if sizes.context > 1 else ""
        layout = f"tensor {sizes.tensor} × {context}pipeline {sizes.pipeline}"
        message = f"{counted(sizes.world, 'worker')} cannot be divided into {layout}"
        changes = (_smaller(request, name, lambda n: True) for name in (TENSOR, CONTEXT, PIPELINE))
        flags = (*request.asked_for(*names), f"{sizes.world} workers in all")
        yield Finding(message, flags, switches=names, changes=tuple(itertools.chain(*changes)))


@LAYOUT_RULES.add("RF010", "[M]", "--pipeline-model-parallel-size 4 --num-layers 6 --world-size 4")
def _model_divides(request: Request) -> Iterator[Finding]:
    """The pipeline size divides the number of blocks and is below it; the tensor size divides heads and hidden size.

    Why: stages and shards of unequal size would wait for the largest one, or could not be made at all;
    --pipeline-stages asks for unequal stages on purpose.
    """
    model, sizes = request.model, request.sizes
    layers, is_equal = model.num_layers, request.config.get("pipeline_stages") is None  # RF075 checks other stages
    if layers is not None and sizes.pipeline > 1 and is_equal and (sizes.pipeline >= layers or layers % sizes.pipeline):
        changes = _smaller(request, PIPELINE, lambda n: n < layers and layers % n == 0)
        if _stages(request) <= layers:
            changes += (add({"pipeline_stages": _even_stages(layers, _stages(request))}, "blocks of each stage"),)
        message = f"{layers} blocks cannot be cut into {sizes.pipeline} stages of more than one block and equal size"
        yield Finding(message, request.asked_for("pipeline-parallel"), ("pipeline-parallel",), changes)
    named = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_key_value_heads,
        "hidden size": model.hidden_size,
    }
    stated = {name: size for name, size in named.items() if size is not None}
    if uneven := [f"{name} {size}" for name, size in stated.items() if size % sizes.tensor]:
        changes = _smaller(request, TENSOR, lambda n: not any(size % n for size in stated.values()))
        message = f"tensor size {sizes.tensor} does not divide {', '.join(uneven)}"
        yield Finding(message, request.asked_for("tensor-parallel"), ("tensor-parallel",), changes)


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


def _tensor_notes(request: Request) -> Sequence[str]:
    size, within = request.sizes.tensor, request.sizes.local_world
    note = f"tensor-parallel: groups of {size} span nodes of {within} workers, which is slow"
    return (note,) if size > within else ()


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
        | {"activations": "a share of each block's and of the logits", "time": "sums over the group"}
    ),
    templates=("Trainer",),
    notes=_tensor_notes,
    sizes={"tensor": "tensor_model_parallel_size"},
    engine="rapidformer_templates.engines.parallel.engine:ParallelEngine",
    builds_in_shares=True,
    master_weights=True,
    transform="rapidformer_templates.switches.layout.tensor:divide_matrices",
    receipt_hooks="rapidformer_templates.switches.layout.tensor:TensorDivision",
    receipt=("parameter_bytes", "parameter_bytes_whole", "tensor_parallel_size", "logits_columns"),
    acted=_tensor_acted,
    rules=(*LAYOUT_RULES, *TENSOR_RULES),
)


SEQUENCE_RULES = RuleList()


@SEQUENCE_RULES.add("RF014", "[M]", "--sequence-parallel --world-size 2")
def _needs_tensor_parallel(request: Request) -> list[Finding]:
    """Sequence parallelism needs tensor parallelism.

    Why: it shards over the workers of a tensor-parallel group; a group of one has nothing to divide.
    """
    return checks.needs(request, "sequence-parallel", "tensor-parallel", add({"tensor_model_parallel_size": 2}))


def _sequence_acted(measured: Measured) -> str | None:
    tokens = measured.all("sequence_tokens")
    if any(own < whole or whole == 1 for own, whole in tokens):
        return None
    return f"a part of each sequence on each worker was expected; [tokens held, in all] are {checks.shown(tokens)}"


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


CONTEXT_RULES = RuleList()


@CONTEXT_RULES.add(
    "RF230",
    "[DeepSpeed-Ulysses]",
    "--context-parallel-size 3 --context-parallel-kind all-to-all --model-type gpt2 "
    "--num-attention-heads 4 --world-size 3",
)
def _heads_divide(request: Request) -> Iterator[Finding]:
    """All-to-all needs attention heads for each worker: the context size divides their number.

    Why: each worker computes attention over whole sequences for its share of the heads; a ring does not divide heads.
    """
    heads, sizes = request.model.num_attention_heads, request.sizes
    if request.config.get(KIND) == "all-to-all" and heads is not None and heads % (sizes.context * sizes.tensor):
        others = sizes.divides // sizes.context
        changes = checks.nearest_divisor(
            CONTEXT, sizes.context, lambda n: not heads % (n * sizes.tensor) and not sizes.world % (n * others)
        )
        tensor = f" of tensor size {sizes.tensor}" if sizes.tensor > 1 else ""
        message = f"context size {sizes.context} does not divide attention heads {heads}{tensor}"
        flags = request.asked_for("context-parallel")
        yield Finding(message, flags, ("context-parallel",), (replace({KIND: "ring"}), *changes))


@CONTEXT_RULES.add("RF231", "[rapidformer_templates]", "--context-parallel-size 2 --task seq2seq_lm --world-size 2")
def _one_sequence(request: Request) -> Iterator[Finding]:
    """Sequences are divided in decoders and encoders, not in models that have both.

    Why: a decoder reads the output of the encoder, whose sequence is another one.
    """
    if request.config.training.task == "seq2seq_lm" or request.model.model_type in ENCODER_DECODERS:
        message = "context-parallel does not work for an encoder-decoder model"
        yield Finding(message, request.asked_for("context-parallel"), switches=("context-parallel",))


ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus", "marian")


def _context_notes(request: Request) -> Sequence[str]:
    reach, within = request.sizes.context * request.sizes.tensor, request.sizes.local_world
    note = f"context-parallel: groups of {reach} workers span nodes of {within}, which is slow"
    return (note,) if reach > within else ()


def _context_acted(measured: Measured) -> str | None:
    size, tokens = measured.plan.sizes.context, measured.all("context_tokens")
    # Two intervals of a ring may together have one token more than a single interval of their length.
    divided = all(own in (-(-whole // size), -(-whole // (2 * size)) * 2) for own, whole in tokens)
    if tokens and divided and all(measured.all("context_attention")):
        return None
    return f"shards of one {size}-th of each sequence were expected; [tokens held, in all] are {checks.shown(tokens)}"


CONTEXT_PARALLEL = Switch(
    name="context-parallel",
    summary="Divide each sequence over N workers, through the whole model.",
    source="[M, DeepSpeed-Ulysses]",
    precedence=Precedence.CONTEXT,
    options=ContextParallelFlags,
    on={CONTEXT: 2},
    predicts=Prediction(
        {
            "gradients": "copies in addition to those of the replicas",
            "activations": "those of a shard of each sequence and of the logits",
            "time": "exchange of queries, keys and values, as all-to-all",
        }
    ),
    templates=("Trainer",),
    notes=_context_notes,
    sizes={"context": CONTEXT},
    transform="rapidformer_templates.switches.layout.context:divide_context",
    receipt_hooks="rapidformer_templates.switches.layout.context:ContextDivision",
    engine_options=lambda request, options: dataclasses.replace(options, context_kind=request.config.get(KIND)),
    receipt=("context_tokens", "context_attention", "context_kind"),
    acted=_context_acted,
    rules=(*LAYOUT_RULES, *CONTEXT_RULES),
)


PIPELINE_RULES = RuleList()


@PIPELINE_RULES.add(
    "RF075",
    "[rapidformer_templates]",
    "--pipeline-model-parallel-size 2 --num-layers 8 --pipeline-stages 3,4 --world-size 2",
)
def _stages_fit(request: Request) -> Iterator[Finding]:
    """--pipeline-stages gives the number of blocks of each stage, and covers all blocks.

    Why: every block is on one stage, and each of the pipeline's workers has as many stages as the others.
    """
    sizes, stages, layers = request.config.get("pipeline_stages"), _stages(request), request.model.num_layers
    if sizes in (None, AUTO_MEMORY):
        return
    words = [word.strip() for word in sizes.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        message = f"--pipeline-stages {sizes} is neither a list of numbers of blocks above zero nor {AUTO_MEMORY}"
    elif len(words) != stages:
        message = f"--pipeline-stages {sizes} names {len(words)} stages; there are {stages}"
    elif layers is not None and sum(map(int, words)) != layers:
        message = f"--pipeline-stages {sizes} has {sum(map(int, words))} blocks; the model has {layers}"
    else:
        return
    changes = [drop({"pipeline_stages": None})]
    if layers and layers >= stages:
        changes.append(replace({"pipeline_stages": _even_stages(layers, stages)}))
    flags = request.asked("pipeline_stages", "pipeline_model_parallel_size", "virtual_pipeline_size")
    yield Finding(message, flags, changes=tuple(changes))


@PIPELINE_RULES.add(
    "RF220",
    "[rapidformer_templates]",
    "--pipeline-model-parallel-size 2 --virtual-pipeline-size 2 --pipeline-stages auto-memory "
    "--num-layers 8 --world-size 2",
)
def _predicted_stages(request: Request) -> Iterator[Finding]:
    """With --pipeline-stages auto-memory each worker has one stage of one or more blocks.

    Why: the search weighs one run of blocks per worker against those of the others; several would be weighed at once.
    """
    by_memory, layers = checks.Given("pipeline_stages", (AUTO_MEMORY,)), request.model.num_layers
    yield from checks.clash(request, by_memory, checks.Given("virtual_pipeline_size"))
    if layers is not None and layers < request.sizes.pipeline:
        message = f"{layers} blocks are too few for {request.sizes.pipeline} stages"
        yield from checks.clash(request, by_memory, "pipeline-parallel", message=message)


@PIPELINE_RULES.add(
    "RF076", "[M]", "--pipeline-model-parallel-size 2 --virtual-pipeline-size 3 --num-layers 4 --world-size 2"
)
def _enough_blocks(request: Request) -> list[Finding]:
    """Interleaved stages have at least one block each.

    Why: a stage without a block would only pass hidden states on.
    """
    stages, layers = _stages(request), request.model.num_layers
    if layers is None or stages <= layers:
        return []
    message = f"{layers} blocks are too few for {stages} stages"
    return checks.clash(request, checks.Given("virtual_pipeline_size"), message=message)


@PIPELINE_RULES.add(
    "RF077", "[rapidformer_templates]", "--task seq2seq_lm --pipeline-model-parallel-size 2 --world-size 2"
)
def _one_run_of_blocks(request: Request) -> list[Finding]:
    """A pipeline needs a model with one run of blocks: no encoder-decoder model.

    Why: every block of a decoder needs the output of the encoder, but stages send one hidden state to the next.
    """
    message = "an encoder-decoder model cannot be cut into pipeline stages"
    return checks.clash(request, "pipeline-parallel", checks.ENCODER_DECODER, message=message)


def _pipeline_acted(measured: Measured) -> str | None:
    """Check that the workers of one stage have the same blocks, and that no block is on two stages."""
    stages = {tuple(blocks) for blocks in measured.all("blocks")}
    names = [name for stage in stages for name in stage]
    if len(stages) == measured.plan.sizes.pipeline and len(set(names)) == len(names):
        return None
    actual = " and ".join(sorted(checks.shown(stage) for stage in stages))
    return f"{measured.plan.sizes.pipeline} stages of different blocks were expected; workers have {actual or 'none'}"


PIPELINE_PARALLEL = Switch(
    name="pipeline-parallel",
    summary="Cut the blocks into N consecutive stages, one per worker.",
    source="[R, M]",
    no_second_model="runs stages in a schedule of one model",
    precedence=Precedence.PARTITION,
    options=PipelineParallelFlags,
    on={"pipeline_model_parallel_size": 2},
    predicts=Prediction(
        dict.fromkeys(("parameters", "gradients", "optimizer"), "those of a stage")
        | {"activations": "those of all micro batches in flight", "time": "the bubble, and what stages send"}
    ),
    templates=("Trainer",),
    sizes={"pipeline": "pipeline_model_parallel_size"},
    engine="rapidformer_templates.switches.layout.pipeline_engine:PipelineEngine",
    builds_in_shares=True,
    master_weights=True,
    transform="rapidformer_templates.switches.layout.pipeline:cut_into_stages",
    receipt=("parameter_bytes", "blocks"),
    acted=_pipeline_acted,
    rules=(*LAYOUT_RULES, *PIPELINE_RULES),
)


SWITCHES = (TENSOR_PARALLEL, CONTEXT_PARALLEL, PIPELINE_PARALLEL, SEQUENCE_PARALLEL, EXPERT_PARALLEL)
