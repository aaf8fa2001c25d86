"""ZeRO-1, -2 and -3: partition the model's states over the data-parallel workers with DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rapidformer_templates.planning.checks import (
    PARTITIONING,
    check_even_shards,
    divides_parameters,
    first_finding,
    idle_without_copies,
    needs_template,
)
from rapidformer_templates.planning.deepspeed_file.file import AUTO
from rapidformer_templates.planning.deepspeed_file.settings import LEAST, MOST, deepspeed_settings
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.request import precision
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
from rapidformer_templates.switches.zero.compiled_parts import ENGINE
from rapidformer_templates.switches.zero.file_switch import DEEPSPEED, DEEPSPEED_CONFIG


@dataclass(frozen=True)
class Zero1Flags:
    """Acceleration"""

    zero_1_memory_optimization: bool = flag(False, "ZeRO-1: shard the optimizer state (DeepSpeed)", choice=PARTITIONING)


@dataclass(frozen=True)
class Zero2Flags:
    """Acceleration"""

    zero_2_memory_optimization: bool = flag(
        False, "ZeRO-2: shard optimizer state and gradients (DeepSpeed)", choice=PARTITIONING
    )


@dataclass(frozen=True)
class Zero3Flags:
    """Acceleration"""

    zero_3_memory_optimization: bool = flag(
        False, "ZeRO-3: shard optimizer state, gradients and parameters (DeepSpeed)", choice=PARTITIONING
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
    return needs_template(request, "zero-1", "zero-2", "zero-3")


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
    return deepspeed_settings(request, precision(request.config, request.environment))


_IDLE_ALONE = idle_without_copies("ZeRO: one worker, so there is nothing to shard")


def _notes(request: Request) -> Sequence[str]:
    size = _deepspeed_config(request)["zero_optimization"]["reduce_bucket_size"]
    if size == AUTO:
        size = f"the square of the model's width, {LEAST:,} to {MOST:,}"
    # The file may have anything here. DeepSpeed's own model checks it before the workers start.
    buckets = f"ZeRO: a bucket holds {format(size, ',') if isinstance(size, int | float) else size} elements"
    return _IDLE_ALONE(request) or (buckets,)


def _notes_without_deepspeed(request: Request) -> Sequence[str]:
    where = "under 3D parallelism" if request.sizes.divides > 1 else "with divided experts"
    what = f"the library's own sharding over the data-parallel workers replaces DeepSpeed {where}"
    idle = "; there is only one of them, so there is nothing to shard" if request.sizes.copies == 1 else ""
    return (f"ZeRO: {what}{idle}",)


def _without_deepspeed(switch: Switch, shards: Literal["optimizer", "gradients"]) -> Switch:
    """Return ZeRO-1 or ZeRO-2 by the engine of 3D layouts."""
    return replace(
        switch,
        needs_package=None,
        engine=None,
        engine_options=lambda request, options: replace(options, shard_over_data=shards),
        notes=_notes_without_deepspeed,
        rules=(only_in_trainer,),
    )


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
    return divides_parameters(measured) if (measured["largest_parameter"] or 0) > threshold else None


_STATES = check_even_shards(updated_elements="optimizer state")


def _gradients(measured: Measured) -> str | None:
    """Check the gradients' shares, except with offload.

    An offloaded share has a copy in host memory, so twice a share does not mean whole gradients.
    """
    if {"cpu-offload", "nvme-offload"} & set(measured.plan.switches):
        return None
    # ZeRO-3 partitions each parameter. ZeRO-2 partitions all of them as one row.
    shares = check_even_shards(whole_at_borders="zero-2" in measured.plan.switches, gradient_elements="gradients")
    return shares(measured)


_ACTED = {1: _STATES, 2: first_finding(_STATES, _gradients), 3: first_finding(_STATES, _gradients, _partitioned)}


def _zero(level: int, options: type, states: str, claims: frozenset[Resource]) -> Switch:
    package: Mapping[str, Any] = DEEPSPEED
    switch = Switch(
        name=f"zero-{level}",
        summary=f"Shard {states} (DeepSpeed).",
        source="[R, D]",
        precedence=Precedence.SHARD,
        options=options,
        predicts=PREDICTION,
        family=PARTITIONING,
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
        **package,
    )
    if level == 3:  # refused under 3D
        return switch
    shards: Literal["optimizer", "gradients"] = "optimizer" if level == 1 else "gradients"
    return replace(switch, divides_copies=True, in_layout=lambda switch: _without_deepspeed(switch, shards))


_STATE = frozenset({Resource.OPTIMIZER_STATE})
_GRADIENTS = _STATE | {Resource.GRADIENTS}

SWITCHES = (
    _zero(1, Zero1Flags, "optimizer state", _STATE),
    _zero(2, Zero2Flags, "optimizer state and gradients", _GRADIENTS),
    _zero(3, Zero3Flags, "parameters, gradients and optimizer state", _GRADIENTS | {Resource.PARAMETERS}),
    DEEPSPEED_CONFIG,
)
