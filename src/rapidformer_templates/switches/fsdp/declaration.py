"""The fsdp switch: torch's ``fully_shard`` on each transformer block, and its options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from rapidformer_templates.planning.checks import (
    PARTITIONING,
    check_even_shards,
    divides_parameters,
    first_finding,
    idle_without_copies,
    shown,
)
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import EngineOptions
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    Rule,
    Switch,
    add,
    always,
    drop,
    replace,
)
from rapidformer_templates.switches.fsdp.hybrid_switch import HYBRID_SHARDING, shares


@dataclass(frozen=True)
class FsdpFlags:
    """Acceleration"""

    fsdp_memory_optimization: bool = flag(
        False,
        "FSDP: shard optimizer state, gradients and parameters (torch fully_shard)",
        choice=PARTITIONING,
        usual=True,
    )


@dataclass(frozen=True)
class FsdpOptionsFlags:
    """Acceleration"""

    fsdp_reshard_after_forward: bool = flag(
        True, "FSDP: free a block's whole parameters between forward and backward; keeping them is faster"
    )
    fsdp_reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        None, "FSDP with mixed precision: type in which gradients are summed (default: fp32)"
    )


OFF = {declared.name: declared.default for declared in dataclasses.fields(FsdpOptionsFlags)}


def _changed_options(request: Request) -> dict[str, Any]:
    """Return the options that differ from their defaults, with their default values."""
    return {name: off for name, off in OFF.items() if request.config.get(name) != off}


def _only_with_fsdp(request: Request) -> list[Finding]:
    options = _changed_options(request)
    if "fsdp" in request.active:
        return _reduces_in_range(request)
    words = " and ".join(spelling(name) for name in options)
    return [
        Finding(
            f"{words} has no effect without --fsdp-memory-optimization",
            request.asked(*options),
            switches=("fsdp-options",),
            changes=(add({"fsdp_memory_optimization": True}),),
        )
    ]


def _reduces_in_range(request: Request) -> list[Finding]:
    """Check the type of gradient sums. 16-bit sums need 16-bit products, and fp16 sums need the loss scale of fp16."""
    reduce_dtype, computed = request.config.get("fsdp_reduce_dtype"), precision(request.config, request.environment)
    if reduce_dtype is None or (computed != "fp32" and (computed, reduce_dtype) != ("bf16", "fp16")):
        return []
    if computed == "fp32":
        message = "--fsdp-reduce-dtype has no effect without --mixed-precision"
        mend = add({"mixed_precision": "fp16" if reduce_dtype == "fp16" else "bf16"})
    else:
        message = "--fsdp-reduce-dtype fp16 needs the loss scale of --mixed-precision fp16"
        mend = replace({"fsdp_reduce_dtype": "bf16"}, "has the range of fp32")
    flags = request.asked("fsdp_reduce_dtype", "mixed_precision")
    return [Finding(message, flags, changes=(mend, drop({"fsdp_reduce_dtype": None})))]


def _options(request: Request, options: EngineOptions) -> EngineOptions:
    sharding = dataclasses.replace(
        options.parameter_sharding,
        reshard_after_forward=request.config.get("fsdp_reshard_after_forward"),
        reduce_dtype=request.config.get("fsdp_reduce_dtype"),
    )
    return dataclasses.replace(options, parameter_sharding=sharding)


_SHARES = first_finding(
    check_even_shards(among=shares, updated_elements="optimizer state", gradient_elements="gradients"),
    divides_parameters,
)


def _options_acted(measured: Measured) -> str | None:
    requested, summed = measured.config.get("fsdp_reduce_dtype"), measured["gradients_summed_in"]
    if requested is not None and summed != [requested]:
        return f"gradients summed in {requested} were expected; they are summed in {shown(summed)}"
    whole = measured["whole_in_backward"]
    if measured.config.get("fsdp_reshard_after_forward") or measured.plan.sizes.copies == 1 or whole == 1:
        return None
    return f"whole parameters at the start of the backward were expected; {whole or 0:.0%} of them are whole"


SWITCHES = (
    Switch(
        name="fsdp",
        summary="Shard parameters, gradients and optimizer state, a block at a time (torch fully_shard).",
        source="[R]",
        precedence=Precedence.SHARD,
        options=FsdpFlags,
        predicts=Prediction(
            dict.fromkeys(("parameters", "gradients", "optimizer"), "a share of each parameter")
            | {
                "activations": "and the whole parameters of the blocks at work",
                "time": "what is gathered and summed",
            }
        ),
        family=PARTITIONING,
        claims=frozenset({Resource.OPTIMIZER_STATE, Resource.GRADIENTS, Resource.PARAMETERS}),
        divides_copies=True,
        notes=idle_without_copies("fsdp: one worker, so there is nothing to shard"),
        engine="rapidformer_templates.switches.fsdp.engine:FSDPEngine",
        receipt=("parameter_bytes", "parameter_bytes_whole", "optimizer_state_bytes"),
        acted=_SHARES,
    ),
    Switch(
        name="fsdp-options",
        summary="Whether FSDP keeps parameters whole between forward and backward, and the type in which it sums "
        "gradients.",
        source="[torch]",
        precedence=Precedence.SHARD,
        options=FsdpOptionsFlags,
        active=lambda options, sizes: any(getattr(options, name) != off for name, off in OFF.items()),
        on={"fsdp_reshard_after_forward": False},
        off=OFF,
        predicts=Prediction(
            {"activations": "without resharding, all whole parameters in addition"},
            always(time="gathering once or twice and the type of the sums make no difference"),
        ),
        engine_options=_options,
        receipt=("parameter_bytes_in_backward", "whole_in_backward", "gradients_summed_in"),
        acted=_options_acted,
        rules=(
            Rule(
                "RF035",
                "FSDP's options need FSDP; the type of its sums needs mixed precision, fp16 also the loss scale.",
                "no other engine gathers parameters for a forward; without mixed precision gradients are fp32, and "
                "without a loss scale small ones vanish in fp16",
                "[torch]",
                _only_with_fsdp,
                Example("--no-fsdp-reshard-after-forward --world-size 2"),
                refusal="Options of FSDP without FSDP, or a type of gradient sums that needs mixed precision.",
            ),
        ),
    ),
    HYBRID_SHARDING,
)
