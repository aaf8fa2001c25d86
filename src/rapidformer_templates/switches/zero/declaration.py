"""ZeRO-1, -2 and -3 (partition the model's states with DeepSpeed), and deepspeed-config: your DeepSpeed file.

Flags fill the ``"auto"`` values of the file, and its values are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from rapidformer_templates.planning import checks
from rapidformer_templates.planning.changes import add
from rapidformer_templates.planning.deepspeed_file import file as ds_file
from rapidformer_templates.planning.deepspeed_file import settings as ds_settings
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import (
    FORECAST,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Reasons,
    Request,
    Resource,
    RuleList,
    Switch,
)
from rapidformer_templates.switches.zero.compiled_parts import ENGINE, INSTALL
from rapidformer_templates.switches.zero.file_check import deepspeed_problems


@dataclass(frozen=True)
class DeepSpeedConfigFlags:
    """Acceleration"""

    deepspeed_config: str | None = flag(
        None, "DeepSpeed file (or its JSON); its 'auto' values come from the flags", metavar="FILE"
    )


FILE_RULES = RuleList()


@FILE_RULES.add(
    "RF021",
    "[deepspeed]",
    "--deepspeed-config ds.json --zero-2-memory-optimization  --pipeline-model-parallel-size 2 --world-size 2",
)
def _pipeline_inside_deepspeed(request: Request) -> list[Finding]:
    """ZeRO-2 and ZeRO-3 do not work with a pipeline inside DeepSpeed.

    Why: DeepSpeed's pipeline accumulates whole gradients, which ZeRO-2 and ZeRO-3 partition.
    """
    partitioned, message = ("zero-2", "zero-3"), "{2} does not work with a pipeline that DeepSpeed runs"
    return checks.clash(request, "deepspeed-config", "pipeline-parallel", partitioned, message=message)


@FILE_RULES.add("RF028", "[D]", "--deepspeed-config ds.json --fsdp-memory-optimization --world-size 2")
def _needs_deepspeed_engine(request: Request) -> Iterator[Finding]:
    """A DeepSpeed file needs the Trainer template, and ZeRO is the only partitioning that it can be combined with.

    Why: DeepSpeed owns the optimizer step, and two engines cannot own it.
    """
    yield from checks.needs_template(request, "deepspeed-config")
    yield from checks.clash(request, "deepspeed-config", checks.partitions_without_zero)


@FILE_RULES.add("RF037", "[D]", "--deepspeed-config ds.json")
def _needs_a_zero_stage(request: Request) -> list[Finding]:
    """A DeepSpeed file names a ZeRO stage, or a flag does.

    Why: without a stage DeepSpeed partitions nothing.
    """
    stages = tuple(add({f"zero_{level}_memory_optimization": True}) for level in (2, 1, 3))
    message = "{} needs a ZeRO stage, in the file or as a flag"
    return checks.needs(
        request, "deepspeed-config", lambda switch: switch.name.startswith("zero-"), *stages, message=message
    )


@FILE_RULES.add(
    "RF036",
    "[D]",
    '--deepspeed-config \'{"zero_optimization": {"stage": 3}}\' --zero-2-memory-optimization --world-size 2',
    packages={"deepspeed": "0.19"},
)
def _agrees(request: Request) -> Iterator[Finding]:
    """A DeepSpeed file and the flags agree.

    Why: one of two values would be silently ignored.
    """
    for message, change in ds_settings.contradictions(request):
        changes = (change,) if change else ()
        yield Finding(message, request.asked_for("deepspeed-config"), ("deepspeed-config",), changes)


@FILE_RULES.add(
    "RF102",
    "[D, deepspeed]",
    '--deepspeed-config \'{"zero_optimization": {"stage": 2}, "gradient_cliping": 1.0}\' '
    "--zero-2-memory-optimization --world-size 2",
    packages={"deepspeed": "0.19"},
)
def _act(request: Request) -> Iterator[Finding]:
    """DeepSpeed or this library acts on every key of a DeepSpeed file, and accepts its value.

    Why: a key that nothing reads would be silently ignored, and a wrong value fails in a worker.
    """
    file, flags = ds_file.file_of(request), request.asked_for("deepspeed-config")
    for path, message in (*ds_file.unknown_keys(file), *ds_file.idle_keys(file), *deepspeed_problems(file.content)):
        yield Finding(message, (*flags, f"{path} ({file.where(path)})"), switches=("deepspeed-config",))


@FILE_RULES.add(
    "RF104",
    "[M]",
    '--deepspeed-config \'{"zero_optimization": {"stage": 1}, "wall_clock_breakdown": true}\' '
    "--zero-1-memory-optimization --pipeline-model-parallel-size 2 --world-size 2",
)
def _deepspeed_is_there(request: Request) -> Iterator[Finding]:
    """Under 3D parallelism a DeepSpeed file contains only what flags can set.

    Why: the library's own sharding replaces DeepSpeed there.
    """
    taken_over = any(name in request.active and not request.active[name].engine for name in ("zero-1", "zero-2"))
    unsupported = ds_settings.keys_without_flag(request)
    if unsupported and (request.sizes.divides > 1 or taken_over):
        dividing = ("tensor-parallel", "pipeline-parallel", "expert-parallel")
        names = ("deepspeed-config", *(name for name in dividing if name in request.active))
        where = "under 3D parallelism" if request.sizes.divides > 1 else "with divided experts"
        message = f"DeepSpeed does not run {where}, and only it knows {', '.join(unsupported)}"
        yield Finding(message, request.asked_for(*names), switches=names)


PLANNED = {
    "stage", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "offload_optimizer", "offload_param",
    "memory_efficient_linear", "override_module_apply",
}  # fmt: skip
"""Keys of ``zero_optimization`` that the planner supports, or that do not change the bytes it counts."""


def _notes_of_file(request: Request) -> Sequence[str]:
    unchecked = f"{ds_file.file_of(request).name}: only DeepSpeed knows its inner keys, and it is not installed here"
    return (*ds_settings.file_notes(request), *([unchecked] if find_spec("deepspeed") is None else []))


def _unknown_of_file(request: Request) -> Reasons:
    others = sorted(
        set(ds_file.section_at(ds_settings.deepspeed_settings(request, "fp32"), "zero_optimization")) - PLANNED
    )
    return dict.fromkeys(FORECAST, f"what {', '.join(others)} of the file changes") if others else {}


def _file_acted(measured: Measured) -> str | None:
    """Check that DeepSpeed runs with the ZeRO settings of the file, unless another engine replaces DeepSpeed."""
    section = ds_file.section_at(ds_file.read(measured.config.get("deepspeed_config")).content, "zero_optimization")
    runs_with = measured["zero_optimization"]
    if measured.plan.engine != ENGINE:
        return None
    if runs_with is None:
        return "a step by DeepSpeed was expected; something else made it"
    for name, value in section.items():
        # After reading it, DeepSpeed renames stage3_max_live_parameters to max_live_parameters.
        used = runs_with.get(name, runs_with.get(name.removeprefix("stage3_")))
        if isinstance(value, bool | int | float) and used not in (value, None):
            return f"zero_optimization.{name} = {value} was expected, as in the file; DeepSpeed has {used}"
    return None


DEEPSPEED_CONFIG = Switch(
    name="deepspeed-config",
    summary="Your own DeepSpeed file.",
    source="[D]",
    precedence=Precedence.SHARD,
    options=DeepSpeedConfigFlags,
    on={"deepspeed_config": "ds.json"},
    predicts=Prediction({"activations": "a bucket of the file's size"}, _unknown_of_file),
    templates=("Trainer",),
    adopt=ds_settings.merge_file,
    needs_package="deepspeed",
    install=INSTALL,
    notes=_notes_of_file,
    receipt=("optimizer_state_bytes", "zero_optimization"),
    acted=_file_acted,
    rules=tuple(FILE_RULES),
)


@dataclass(frozen=True)
class Zero1Flags:
    """Acceleration"""

    zero_1_memory_optimization: bool = flag(
        False, "ZeRO-1: shard the optimizer state (DeepSpeed)", choice=checks.PARTITIONING
    )


@dataclass(frozen=True)
class Zero2Flags:
    """Acceleration"""

    zero_2_memory_optimization: bool = flag(
        False, "ZeRO-2: shard optimizer state and gradients (DeepSpeed)", choice=checks.PARTITIONING
    )


@dataclass(frozen=True)
class Zero3Flags:
    """Acceleration"""

    zero_3_memory_optimization: bool = flag(
        False, "ZeRO-3: shard optimizer state, gradients and parameters (DeepSpeed)", choice=checks.PARTITIONING
    )
    zero_3_param_persistence_threshold: int | None = flag(
        None,
        "ZeRO-3 keeps parameters of at most this many elements whole: more memory, less to gather (default: 10 × the "
        "model's width)",
        minimum=0,
    )
    zero_3_prefetch_bucket_size: int | None = flag(
        None,
        "elements that ZeRO-3 gathers ahead of their use: more memory, less waiting (default: 0.9 × the square of "
        "the model's width)",
        minimum=0,
    )
    zero_3_max_live_parameters: int = flag(
        1_000_000_000, "elements of whole parameters that ZeRO-3 may hold at a time", minimum=0
    )


KINDS = ("cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu")
"""Device types, in torch's names, for which DeepSpeed has an accelerator class."""


RULES = RuleList()


@RULES.add("RF002", "[R]", "--template Finetuner --zero-3-memory-optimization --world-size 2")
def only_in_trainer(request: Request) -> Iterator[Finding]:
    """ZeRO needs the Trainer template.

    Why: ZeRO partitions through DeepSpeed, which owns the optimizer step.
    """
    return checks.needs_template(request, "zero-1", "zero-2", "zero-3")


@RULES.add("RF245", "[D]", "--zero-1-memory-optimization --world-size 2", device="maia")
def _knows_device(request: Request) -> Iterator[Finding]:
    """ZeRO needs a device that DeepSpeed knows.

    Why: DeepSpeed has no class for other devices, and would compute on the CPU while the model is elsewhere.
    """
    device = request.environment.device
    # The engine of 3D layouts has its own ZeRO.
    names = tuple(name for name, switch in request.active.items() if name.startswith("zero-") and switch.engine)
    if device not in KINDS and names:
        yield Finding(f"DeepSpeed does not compute on {device}", request.asked_for(*names), switches=names)


def _deepspeed_config(request: Request) -> dict[str, Any]:
    return ds_settings.deepspeed_settings(request, precision(request.config, request.environment))


_IDLE_ALONE = checks.idle_without_copies("ZeRO: one worker, so there is nothing to shard")


def _notes(request: Request) -> Sequence[str]:
    size = _deepspeed_config(request)["zero_optimization"]["reduce_bucket_size"]
    if size == ds_file.AUTO:
        smallest = ds_settings.smallest_bucket(request.environment.device)
        size = f"the square of the model's width, {smallest:,} to {ds_settings.MOST:,}"
    # The file may have anything here. DeepSpeed's own model checks it before the workers start.
    buckets = f"ZeRO: a bucket holds {format(size, ',') if isinstance(size, int | float) else size} elements"
    return _IDLE_ALONE(request) or (buckets,)


def _notes_without_deepspeed(request: Request) -> Sequence[str]:
    where = "under 3D parallelism" if request.sizes.divides > 1 else "with divided experts"
    what = f"the library's own sharding over the data-parallel workers replaces DeepSpeed {where}"
    idle = "; there is only one of them, so there is nothing to shard" if request.sizes.copies == 1 else ""
    return (f"ZeRO: {what}{idle}",)


PREDICTION = Prediction(
    {
        "parameters": "in the compute type; with ZeRO-3 a share, and small ones whole",
        "gradients": "a share; whole for parameters that two workers share",
        "optimizer": "a share, with fp32 masters",
        "activations": "DeepSpeed's bucket and what it gathers in addition",
        "time": "what the replicas exchange",
    }
)


def _partitioned(measured: Measured) -> str | None:
    """Check that parameters are partitioned, if the model has one above ZeRO-3's threshold."""
    settings = measured["zero_optimization"] or {}
    threshold = settings.get("param_persistence_threshold", 0)
    return checks.divides_parameters(measured) if (measured["largest_parameter"] or 0) > threshold else None


_STATES = checks.check_even_shards(updated_elements="optimizer state")


def _gradients(measured: Measured) -> str | None:
    """Check the gradients' shares, except with offload.

    An offloaded share has a copy in host memory, so twice a share does not mean whole gradients.
    """
    if {"cpu-offload", "nvme-offload"} & set(measured.plan.switches):
        return None
    # ZeRO-3 partitions each parameter. ZeRO-2 partitions all of them as one row.
    shares = checks.check_even_shards(
        whole_at_borders="zero-2" in measured.plan.switches, gradient_elements="gradients"
    )
    return shares(measured)


_ACTED = {
    1: _STATES,
    2: checks.first_finding(_STATES, _gradients),
    3: checks.first_finding(_STATES, _gradients, _partitioned),
}


def _zero(level: int, options: type, states: str, claims: frozenset[Resource]) -> Switch:
    switch = Switch(
        name=f"zero-{level}",
        summary=f"Shard {states} (DeepSpeed).",
        source="[R, D]",
        precedence=Precedence.SHARD,
        options=options,
        predicts=PREDICTION,
        family=checks.PARTITIONING,
        claims=claims,
        templates=("Trainer",),
        rules=tuple(RULES),
        notes=_notes,
        prepare="rapidformer_templates.switches.zero.compiled_parts:prepare",
        engine=ENGINE,
        builds_in_shares=level == 3,
        engine_options=lambda request, options: replace(options, deepspeed=_deepspeed_config(request)),
        receipt=(
            "parameter_bytes",
            "parameter_bytes_whole",
            "optimizer_state_bytes",
            "gradient_bytes",
            "zero_optimization",
        ),
        acted=_ACTED[level],
        # With freed memory "kept", ZeRO-2 took 2,049 MB instead of 1,661 MB. ZeRO-3 took 1,368 MB with it "given back"
        # and 1,846 MB "as usual", where DDP took 1,400 MB.
        freed_memory="given back" if level == 3 else "as usual",
        needs_package="deepspeed",
        install=INSTALL,
    )
    if level == 3:  # refused under 3D
        return switch
    shards: Literal["optimizer", "gradients"] = "optimizer" if level == 1 else "gradients"
    return replace(
        switch,
        divides_copies=True,
        in_layout=lambda switch: replace(
            switch,
            needs_package=None,
            engine=None,
            engine_options=lambda request, options: replace(options, shard_over_data=shards),
            notes=_notes_without_deepspeed,
            rules=(only_in_trainer,),
        ),
    )


_STATE = frozenset({Resource.OPTIMIZER_STATE})
_GRADIENTS = _STATE | {Resource.GRADIENTS}

SWITCHES = (
    _zero(1, Zero1Flags, "optimizer state", _STATE),
    _zero(2, Zero2Flags, "optimizer state and gradients", _GRADIENTS),
    _zero(3, Zero3Flags, "parameters, gradients and optimizer state", _GRADIENTS | {Resource.PARAMETERS}),
    DEEPSPEED_CONFIG,
)
