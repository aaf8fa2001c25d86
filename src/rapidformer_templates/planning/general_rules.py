"""Rules that belong to no single switch. The other rules are in the file of their switch."""

from __future__ import annotations

from dataclasses import Field
from functools import cache

from rapidformer_templates.planning.checks import one_claim
from rapidformer_templates.planning.config import fields_of, spelling
from rapidformer_templates.planning.environment import no_device
from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.schedules import WARMUPS
from rapidformer_templates.planning.switch import (
    Change,
    Example,
    Finding,
    Request,
    Resource,
    Rule,
    RuleList,
    add,
    drop,
    replace,
)

RULES = RuleList()


def _leave_out(*names: str) -> tuple[Change, ...]:
    """Suggest to remove one of the named flags."""
    return tuple(drop({name: None}) for name in names)


@RULES.add(
    "RF015",
    "Exactly one of --epochs and --train-iters is given.",
    "both set the end of training",
    "[R]",
    Example("--epochs 3 --train-iters 1000"),
    refusal="A training command with both --epochs and --train-iters, or with neither.",
)
def _epochs_or_iterations(request: Request) -> list[Finding]:
    training = request.config.training
    if training.epochs is not None and training.train_iters is not None:
        flags = request.asked("epochs", "train_iters")
        message = "--epochs and --train-iters exclude each other"
        return [Finding(message, flags, changes=_leave_out("epochs", "train_iters"))]
    if request.training and training.epochs is None and training.train_iters is None:
        choices = (add({"epochs": 3}, "passes over the data"), add({"train_iters": 1000}, "optimizer steps"))
        return [Finding("neither --epochs nor --train-iters is given", changes=choices)]
    return []


@RULES.add(
    "RF023",
    "A switch's package is installed.",
    "nothing else is used instead, and a switch that cannot act is refused",
    "[environment]",
    Example("--optimizer adamw_apex_fused", machine={"device": "cuda", "compute_capability": (8, 0)}),
    refusal="A switch whose package is not installed.",
)
def _package_installed(request: Request) -> list[Finding]:
    missing = [
        Finding(
            f"{switch.name} needs {switch.needs_package}, which is not installed: {switch.install}",
            request.asked_for(switch.name),
            switches=(switch.name,),
        )
        for switch in request.active.values()
        if switch.needs_package and switch.needs_package not in request.environment.packages
    ]
    optimizer = optimizer_facts(request)
    if (package := optimizer.package) and package.name not in request.environment.packages:
        message = f"{optimizer.name} needs {package.name}, which is not installed: {package.install}"
        missing.append(Finding(message, request.asked("optimizer"), changes=(replace({"optimizer": "adamw"}),)))
    return missing


@RULES.add(
    "RF024",
    "A device that needs a GPU has one.",
    "nothing falls back to a CPU silently",
    "[torch]",
    Example("--device cuda --lr 5e-5 --epochs 3 --save run", machine={"device": "cuda"}, training=True),
    refusal="Training on a GPU on a machine without a GPU.",
)
def _gpu_present(request: Request) -> list[Finding]:
    if not request.training or request.environment.has_device:
        return []
    message = no_device(request.environment.device)
    return [Finding(message, request.asked("device"), changes=(replace({"device": "cpu"}),))]


@RULES.add(
    "RF030",
    "The global batch size is a multiple of micro batch size × data-parallel size.",
    "an optimizer step is a whole number of micro batches on every worker",
    "[R]",
    Example("--micro-batch-size 4 --global-batch-size 10 --world-size 2"),
    refusal="A global batch that the workers cannot divide into whole micro batches.",
)
def _batch_divides(request: Request) -> list[Finding]:
    sizes = request.sizes
    step = sizes.micro_batch * sizes.data
    if sizes.world % sizes.divides or sizes.global_batch % step == 0:
        return []  # without a whole data-parallel size there is nothing to divide by
    near = [n for n in (sizes.global_batch // step * step, -(-sizes.global_batch // step) * step) if n]
    return [
        Finding(
            f"global batch size {sizes.global_batch} is not divisible by micro batch {sizes.micro_batch} × "
            f"data-parallel size {sizes.data}; the nearest that work: {' and '.join(map(str, near))}",
            (*request.asked("global_batch_size", "micro_batch_size"), f"data-parallel size {sizes.data}"),
            changes=tuple(replace({"global_batch_size": n}, f"{n // step} × {step} samples per step") for n in near),
        )
    ]


@RULES.add(
    "RF031",
    "Training needs a learning rate.",
    "no rate suits every model, so there is no default",
    "[R]",
    Example("--epochs 3 --save run", training=True),
    refusal="A training command without --lr.",
)
def _learning_rate(request: Request) -> list[Finding]:
    if not request.training or request.config.training.lr is not None:
        return []
    note = "fine-tuning usually starts at 2e-5 to 5e-5, pretraining at 1e-4 to 6e-4"
    return [Finding("--lr is missing", changes=(add({"lr": 5e-5}, note),))]


@RULES.add(
    "RF032",
    "Warmup is given only once: in steps, in samples or as a share.",
    "each sets the number of warmup steps",
    "[R]",
    Example("--lr-warmup-iters 10 --lr-warmup-fraction 0.1"),
    refusal="A warmup that is given twice, such as in steps and as a share.",
)
def _one_warmup(request: Request) -> list[Finding]:
    flags = [name for name in WARMUPS if request.config.get(name) is not None]
    if len(flags) < 2:
        return []
    message = f"{' and '.join(map(spelling, flags))} exclude each other"
    return [Finding(message, request.asked(*flags), changes=_leave_out(*flags))]


@RULES.add(
    "RF150",
    "A given data-parallel size matches the number of workers.",
    "it follows from the number of workers and the tensor and pipeline sizes; any other size would mean a "
    "different run than intended",
    "[M]",
    Example("--data-parallel-size 4 --tensor-model-parallel-size 2 --world-size 4"),
    refusal="A --data-parallel-size that contradicts the number of workers.",
)
def _data_size_is_so(request: Request) -> list[Finding]:
    requested, sizes = request.config.launch.data_parallel_size, request.sizes
    divides = sizes.divides
    if requested is None or requested * divides == sizes.world:
        return []
    context = f"context {sizes.context} × " if sizes.context > 1 else ""
    message = (
        f"data-parallel size {requested} × tensor {sizes.tensor} × {context}pipeline {sizes.pipeline} "
        f"are {requested * divides} workers, but there are {sizes.world}"
    )
    changes = (drop({"data_parallel_size": None}),)
    return [Finding(message, request.asked("data_parallel_size"), changes=changes)]


@RULES.add(
    "RF033",
    "A sequence fits into the model's positions.",
    "there is no embedding for a position beyond the last",
    "[transformers]",
    Example("--seq-length 1024 --max-position-embeddings 512"),
    refusal="Sequences that are longer than the positions of the model.",
)
def _sequence_fits(request: Request) -> list[Finding]:
    length, positions = request.config.model.seq_length, request.model.max_position_embeddings
    if length is None or positions is None or length <= positions:
        return []
    message = f"sequences of {length} tokens are longer than the model's {positions} positions"
    return [Finding(message, request.asked("seq_length"), changes=(replace({"seq_length": positions}),))]


@RULES.add(
    "RF034",
    "A flag that has an effect only with another is given together with it.",
    "alone it would be silently ignored",
    "[rapidformer_templates]",
    Example("--moe-top-k 2"),
    refusal="A flag that has an effect only together with another flag, which is missing.",
)
def _has_companion(request: Request) -> list[Finding]:
    findings = []
    for declared, companion in _with_companions(request.config.kinds()):
        (name, default), (other, value) = (declared.name, declared.default), declared.metadata["only_with"]
        if request.config.get(name) != default and request.config.get(other) == companion.default:
            changes = (add({other: value}), drop({name: default}))
            message = f"{spelling(name)} has no effect without {spelling(other)}"
            findings.append(Finding(message, request.asked(name), changes=changes))
    return findings


@cache
def _with_companions(kinds: tuple[type, ...]) -> tuple[tuple[Field[object], Field[object]], ...]:
    """Return each flag that has an effect only with another one, together with that one."""
    fields = [declared for kind in kinds for declared in fields_of(kind)]
    by_name = {declared.name: declared for declared in fields}
    pairs = ((declared, declared.metadata.get("only_with")) for declared in fields)
    return tuple((declared, by_name[pair[0]]) for declared, pair in pairs if pair)


@RULES.add(
    "RF050",
    "Sequence packing is for --task causal_lm.",
    "packed samples are kept apart by a causal block-diagonal mask; other tasks attend in both directions, have "
    "one label per row, or already have rows of one length",
    "[rapidformer_templates]",
    Example("--task sequence_classification --pack-sequences"),
    refusal="Sequence packing in a task other than causal_lm.",
)
def _packs_samples(request: Request) -> list[Finding]:
    data, task = request.config.data, request.config.training.task
    if not data.pack_sequences or task == "causal_lm":
        return []
    message = f"packed samples need --task causal_lm, not {task or 'your own data'}"
    changes = (drop({"pack_sequences": False}), replace({"task": "causal_lm"}))
    return [Finding(message, request.asked("pack_sequences", "task"), changes=changes)]


@RULES.add(
    "RF051",
    "Packed rows are not grouped by length.",
    "all of them have the same length",
    "[rapidformer_templates]",
    Example("--task causal_lm --pack-sequences --group-by-length"),
    refusal="Packed rows together with --group-by-length.",
)
def _groups_packed_rows(request: Request) -> list[Finding]:
    if not (request.config.data.pack_sequences and request.config.data.group_by_length):
        return []
    flags = request.asked("group_by_length", "pack_sequences")
    changes = (drop({"group_by_length": None}), drop({"pack_sequences": False}))
    return [Finding("--group-by-length has nothing to group in packed rows", flags, changes=changes)]


@RULES.add(
    "RF052",
    "--loss-on is for --task causal_lm.",
    "in other tasks the labels of the data set decide what is learned",
    "[rapidformer_templates]",
    Example("--task masked_lm --loss-on answers"),
    refusal="--loss-on in a task other than causal_lm.",
)
def _learns_answers(request: Request) -> list[Finding]:
    loss_on, task = request.config.data.loss_on, request.config.training.task
    if loss_on is None or task == "causal_lm":
        return []
    message = f"--loss-on {loss_on} needs --task causal_lm, not {task or 'your own data'}"
    changes = (drop({"loss_on": None}), replace({"task": "causal_lm"}))
    return [Finding(message, request.asked("loss_on", "task"), changes=changes)]


RULES += [
    Rule(
        "RF008",
        "At most one switch partitions the model's states.",
        "each of them decides which worker holds which state",
        "[R]",
        one_claim(Resource.OPTIMIZER_STATE, Resource.GRADIENTS, Resource.PARAMETERS),
        Example("--fsdp-memory-optimization --oss-memory-optimization --world-size 2"),
        refusal="Two switches that divide the same states, such as FSDP and ZeRO-3.",
    ),
    Rule(
        "RF016",
        "At most one switch captures the model's graph.",
        "torch.compile cannot compile a graph that ONNX Runtime runs, nor the other way round",
        "[torch, onnxruntime]",
        one_claim(Resource.GRAPH),
        Example("--onnx-runtime-training --torch-compile"),
        refusal="Two switches that capture the graph of the model: torch.compile and ONNX Runtime.",
    ),
    Rule(
        "RF026",
        "The optimizer state is offloaded to one place.",
        "--nvme-path already moves optimizer state and parameters",
        "[D]",
        one_claim(Resource.OFFLOAD),
        Example("--cpu-offload --nvme-path /local_nvme --zero-3-memory-optimization --world-size 2"),
        refusal="Two places for the optimizer state: host memory and a disk.",
    ),
]
