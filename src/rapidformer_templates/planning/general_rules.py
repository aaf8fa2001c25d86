"""Rules that belong to no single switch. The other rules are in the file of their switch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field
from functools import cache

from rapidformer_templates.planning.checks import Given, clash, needs, one_claim
from rapidformer_templates.planning.config import fields_of, spelling
from rapidformer_templates.planning.environment import no_device
from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.schedules import WARMUPS
from rapidformer_templates.planning.switch import (
    Finding,
    Request,
    Resource,
    RuleList,
    add,
    drop,
    replace,
)

RULES = RuleList()
CAUSAL = Given("task", ("causal_lm",))


@RULES.add("RF015", "[R]", "--epochs 3 --train-iters 1000")
def _epochs_or_iterations(request: Request) -> Iterator[Finding]:
    """Exactly one of --epochs and --train-iters is given.

    Why: both set the end of training.
    """
    training = request.config.training
    yield from clash(request, Given("epochs"), Given("train_iters"), message="{0} and {1} exclude each other")
    if request.training and training.epochs is None and training.train_iters is None:
        choices = (add({"epochs": 3}, "passes over the data"), add({"train_iters": 1000}, "optimizer steps"))
        yield Finding("neither --epochs nor --train-iters is given", changes=choices)


@RULES.add("RF023", "[environment]", "--optimizer adamw_apex_fused", device="cuda", compute_capability=(8, 0))
def _package_installed(request: Request) -> Iterator[Finding]:
    """A switch's package is installed.

    Why: nothing else is used instead, and a switch that cannot act is refused.
    """
    packages, optimizer = request.environment.packages, optimizer_facts(request)
    for switch in request.active.values():
        if switch.needs_package and switch.needs_package not in packages:
            message = f"{switch.name} needs {switch.needs_package}, which is not installed: {switch.install}"
            yield Finding(message, request.asked_for(switch.name), switches=(switch.name,))
    if (package := optimizer.package) and package.name not in packages:
        message = f"{optimizer.name} needs {package.name}, which is not installed: {package.install}"
        yield Finding(message, request.asked("optimizer"), changes=(replace({"optimizer": "adamw"}),))


@RULES.add("RF024", "[torch]", "--device cuda --lr 5e-5 --epochs 3 --save run", training=True, device="cuda")
def _gpu_present(request: Request) -> Iterator[Finding]:
    """A device that needs a GPU has one.

    Why: nothing falls back to a CPU silently.
    """
    if request.training and not request.environment.has_device:
        message = no_device(request.environment.device)
        yield Finding(message, request.asked("device"), changes=(replace({"device": "cpu"}),))


@RULES.add("RF030", "[R]", "--micro-batch-size 4 --global-batch-size 10 --world-size 2")
def _batch_divides(request: Request) -> Iterator[Finding]:
    """The global batch size is a multiple of micro batch size × data-parallel size.

    Why: an optimizer step is a whole number of micro batches on every worker.
    """
    sizes = request.sizes
    step = sizes.micro_batch * sizes.data
    if sizes.world % sizes.divides or sizes.global_batch % step == 0:
        return  # without a whole data-parallel size there is nothing to divide by
    near = [n for n in (sizes.global_batch // step * step, -(-sizes.global_batch // step) * step) if n]
    yield Finding(
        f"global batch size {sizes.global_batch} is not divisible by micro batch {sizes.micro_batch} × "
        f"data-parallel size {sizes.data}; the nearest that work: {' and '.join(map(str, near))}",
        (*request.asked("global_batch_size", "micro_batch_size"), f"data-parallel size {sizes.data}"),
        changes=tuple(replace({"global_batch_size": n}, f"{n // step} × {step} samples per step") for n in near),
    )


@RULES.add("RF031", "[R]", "--epochs 3 --save run", training=True)
def _learning_rate(request: Request) -> Iterator[Finding]:
    """Training needs a learning rate.

    Why: no rate suits every model, so there is no default.
    """
    if request.training and request.config.training.lr is None:
        note = "fine-tuning usually starts at 2e-5 to 5e-5, pretraining at 1e-4 to 6e-4"
        yield Finding("--lr is missing", changes=(add({"lr": 5e-5}, note),))


@RULES.add("RF032", "[R]", "--lr-warmup-iters 10 --lr-warmup-fraction 0.1")
def _one_warmup(request: Request) -> Iterator[Finding]:
    """Warmup is given only once: in steps, in samples or as a share.

    Why: each sets the number of warmup steps.
    """
    flags = [name for name in WARMUPS if request.config.get(name) is not None]
    if len(flags) > 1:
        message = f"{' and '.join(map(spelling, flags))} exclude each other"
        yield Finding(message, request.asked(*flags), changes=tuple(drop({name: None}) for name in flags))


@RULES.add("RF150", "[M]", "--data-parallel-size 4 --tensor-model-parallel-size 2 --world-size 4")
def _data_size_is_so(request: Request) -> Iterator[Finding]:
    """A given data-parallel size matches the number of workers.

    Why: it follows from the number of workers and the tensor and pipeline sizes; any other size would mean a different
    run than intended.
    """
    requested, sizes = request.config.launch.data_parallel_size, request.sizes
    if requested is not None and requested * sizes.divides != sizes.world:
        context = f"context {sizes.context} × " if sizes.context > 1 else ""
        message = (
            f"data-parallel size {requested} × tensor {sizes.tensor} × {context}pipeline {sizes.pipeline} "
            f"are {requested * sizes.divides} workers, but there are {sizes.world}"
        )
        changes = (drop({"data_parallel_size": None}),)
        yield Finding(message, request.asked("data_parallel_size"), changes=changes)


@RULES.add("RF033", "[transformers]", "--seq-length 1024 --max-position-embeddings 512")
def _sequence_fits(request: Request) -> Iterator[Finding]:
    """A sequence fits into the model's positions.

    Why: there is no embedding for a position beyond the last.
    """
    length, positions = request.config.model.seq_length, request.model.max_position_embeddings
    if length is not None and positions is not None and length > positions:
        message = f"sequences of {length} tokens are longer than the model's {positions} positions"
        yield Finding(message, request.asked("seq_length"), changes=(replace({"seq_length": positions}),))


@RULES.add("RF034", "[rapidformer_templates]", "--moe-top-k 2")
def _has_companion(request: Request) -> Iterator[Finding]:
    """A flag that has an effect only with another is given together with it.

    Why: alone it would be silently ignored.
    """
    for declared, companion in _with_companions(request.config.kinds()):
        (name, default), (other, value) = (declared.name, declared.default), declared.metadata["only_with"]
        if request.config.get(name) != default and request.config.get(other) == companion.default:
            changes = (add({other: value}), drop({name: default}))
            message = f"{spelling(name)} has no effect without {spelling(other)}"
            yield Finding(message, request.asked(name), changes=changes)


@cache
def _with_companions(kinds: tuple[type, ...]) -> tuple[tuple[Field[object], Field[object]], ...]:
    """Return each flag that has an effect only with another one, together with that one."""
    fields = [declared for kind in kinds for declared in fields_of(kind)]
    by_name = {declared.name: declared for declared in fields}
    pairs = ((declared, declared.metadata.get("only_with")) for declared in fields)
    return tuple((declared, by_name[pair[0]]) for declared, pair in pairs if pair)


@RULES.add("RF050", "[rapidformer_templates]", "--task sequence_classification --pack-sequences")
def _packs_samples(request: Request) -> list[Finding]:
    """Sequence packing is for --task causal_lm.

    Why: packed samples are kept apart by a causal block-diagonal mask; other tasks attend in both directions, have one
    label per row, or already have rows of one length.
    """
    return needs(request, Given("pack_sequences"), CAUSAL, replace({"task": "causal_lm"}))


@RULES.add("RF051", "[rapidformer_templates]", "--task causal_lm --pack-sequences --group-by-length")
def _groups_packed_rows(request: Request) -> list[Finding]:
    """Packed rows are not grouped by length.

    Why: all of them have the same length.
    """
    return clash(
        request, Given("group_by_length"), Given("pack_sequences"), message="{0} has nothing to group in packed rows"
    )


@RULES.add("RF052", "[rapidformer_templates]", "--task masked_lm --loss-on answers")
def _learns_answers(request: Request) -> list[Finding]:
    """--loss-on is for --task causal_lm.

    Why: in other tasks the labels of the data set decide what is learned.
    """
    return needs(request, Given("loss_on"), CAUSAL, replace({"task": "causal_lm"}))


@RULES.add("RF008", "[R]", "--fsdp-memory-optimization --oss-memory-optimization --world-size 2")
def _one_partitioning(request: Request) -> Iterator[Finding]:
    """At most one switch partitions the model's states.

    Why: each of them decides which worker holds which state.
    """
    return one_claim(request, Resource.OPTIMIZER_STATE, Resource.GRADIENTS, Resource.PARAMETERS)


@RULES.add("RF016", "[torch, onnxruntime]", "--onnx-runtime-training --torch-compile")
def _one_graph(request: Request) -> Iterator[Finding]:
    """At most one switch captures the model's graph.

    Why: torch.compile cannot compile a graph that ONNX Runtime runs, nor the other way round.
    """
    return one_claim(request, Resource.GRAPH)


@RULES.add("RF026", "[D]", "--cpu-offload --nvme-path /local_nvme --zero-3-memory-optimization --world-size 2")
def _one_offload(request: Request) -> Iterator[Finding]:
    """The optimizer state is offloaded to one place.

    Why: --nvme-path already moves optimizer state and parameters.
    """
    return one_claim(request, Resource.OFFLOAD)
