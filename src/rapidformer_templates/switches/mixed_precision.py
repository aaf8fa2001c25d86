"""Mixed precision: products and weights in 16 bits, fp32 masters and optimizer state. And tf32: fp32 products."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from rapidformer_templates.planning.changes import replace
from rapidformer_templates.planning.checks import needs_template, shown
from rapidformer_templates.planning.environment import AMPERE
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import EngineOptions, MasterTypes
from rapidformer_templates.planning.request import optimizer_class, precision, wide_weights
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    always,
)

if TYPE_CHECKING:
    from rapidformer_templates.engines.assembly import Assembly, Building

_option = partial(flag, only_with=("mixed_precision", "bf16"))


@dataclass(frozen=True)
class MixedPrecisionFlags:
    """Acceleration"""

    mixed_precision: Literal["fp16", "bf16"] | None = flag(
        None,
        "16-bit matrix products; without a type: fp16 on a GPU, bf16 on a CPU",
        bare="auto",
        aliases={"fp16": "fp16", "bf16": "bf16"},
        metavar="fp16|bf16",
        usual=True,
    )
    keep_fp32_parameters: bool = _option(
        False, "keep weights in fp32 and cast them where they are used, instead of 16-bit weights with fp32 masters"
    )
    grad_accum_dtype: Literal["fp32", "bf16"] = _option(
        "fp32", "type in which gradients of 16-bit weights are accumulated"
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = _option(
        "fp32", "type in which they are summed over data-parallel workers"
    )


@dataclass(frozen=True)
class Tf32Flags:
    """Acceleration"""

    tf32: bool = flag(False, "fp32 matrix products through the tensor cores' tf32 (Ampere or newer)")


def _notes(request: Request) -> Sequence[str]:
    chosen, why = precision(request.config, request.environment), wide_weights(request)
    note = f"the parameters are not converted to 16-bit weights with fp32 masters ({why})"
    notes = [note if why else f"weights are {chosen}, with fp32 masters next to the optimizer's state"]
    update = optimizer_class(request)
    if not why and request.config.get("grad_accum_dtype") != "fp32" and not update.per_parameter:
        together = f"{update.path} needs all gradients at once, so all of them are copied to fp32"
        notes.append(f"{together}; --optimizer adamw takes them bucket by bucket")
    if request.config.get("mixed_precision") == "auto":
        device = request.environment.device.upper()
        notes.insert(0, f"--mixed-precision without a type: {chosen}, because the device is a {device}")
    return notes


def _options(request: Request, options: EngineOptions) -> EngineOptions:
    if wide_weights(request):
        return options
    types = MasterTypes(request.config.get("grad_accum_dtype"), request.config.get("grad_reduce_dtype"))
    return dataclasses.replace(options, master_weights=types)


OF_GRADIENTS = ("grad_accum_dtype", "grad_reduce_dtype")


RULES, TF32_RULES = RuleList(), RuleList()


@RULES.add("RF201", "[M]", "--mixed-precision bf16 --keep-fp32-parameters --grad-accum-dtype bf16")
def _gradients_of_wide_weights(request: Request) -> Iterator[Finding]:
    """The types of gradients can be chosen for 16-bit weights with masters.

    Why: elsewhere gradients have the type of their weights, or one that DeepSpeed or FSDP chooses.
    """
    flags, why = [name for name in OF_GRADIENTS if request.config.get(name) != "fp32"], wide_weights(request)
    if flags and why:
        message = f"gradients have the type of the parameters here, which are not 16-bit weights with masters ({why})"
        yield Finding(message, request.asked(*flags), changes=tuple(replace({name: "fp32"}) for name in flags))


@RULES.add("RF019", "[torch, S]", "--mixed-precision bf16", device="cuda", compute_capability=(7, 0))
def _bf16_before_ampere(request: Request) -> Iterator[Finding]:
    """bf16 on a GPU needs compute capability 8.0.

    Why: older GPUs have no bf16 matrix units and emulate them more slowly than fp32.
    """
    capability = request.environment.compute_capability
    if capability and capability < AMPERE and precision(request.config, request.environment) == "bf16":
        message = f"bf16 needs a GPU of compute capability 8.0 or newer; this one has {capability[0]}.{capability[1]}"
        change = replace({"mixed_precision": "fp16"}, "scales the loss, as the smaller range of fp16 needs")
        yield Finding(message, request.asked("mixed_precision"), ("mixed-precision",), (change,))


@RULES.add("RF001", "[R]", "--mixed-precision bf16", template=None)
def _in_templates(request: Request) -> Iterator[Finding]:
    """Mixed precision needs one of the three templates.

    Why: the template's engine casts and scales the loss; your own loop does neither.
    """
    return needs_template(request, "mixed-precision")


def _acted(measured: Measured) -> str | None:
    expected = {"bf16": "bfloat16", "fp16": "float16"}[measured.plan.precision]
    returned, weights = (
        sorted({kind for kinds in measured.all(receipt) for kind in kinds})
        for receipt in ("activation_dtypes", "parameter_dtypes")
    )
    if expected not in returned:
        return f"activations in {expected} were expected; modules return {shown(returned)}"
    if measured.plan.engine_options.master_weights and expected not in weights:
        return f"weights in {expected} with fp32 masters were expected; the weights are {shown(weights)}"
    return None


@TF32_RULES.add("RF018", "[S, torch]", "--tf32")
def _needs_ampere(request: Request) -> Iterator[Finding]:
    """tf32 needs an Ampere or newer GPU.

    Why: tf32 is a mode of the tensor cores since compute capability 8.0; elsewhere it would do nothing.
    """
    capability = request.environment.compute_capability
    if request.environment.device != "cuda" or (capability and capability < AMPERE):
        # A plan may be made on a machine without the GPU. Training checks again.
        has = f"this one has {capability[0]}.{capability[1]}" if capability else "this run is on a CPU"
        message = f"tf32 needs a GPU of compute capability 8.0 or newer; {has}"
        yield Finding(message, request.asked_for("tf32"), switches=("tf32",))


def allow_tf32(assembly: Assembly, building: Building[object]) -> None:
    """Let fp32 matrix products round their inputs to TF32, with a 10-bit mantissa. cuDNN does so by default."""
    import torch

    torch.set_float32_matmul_precision("high")


def _tf32_acted(measured: Measured) -> str | None:
    precision = measured["matmul_precision"]
    return None if precision == "high" else f"fp32 matrix products of precision high were expected; it is {precision}"


SWITCHES = (
    Switch(
        name="mixed-precision",
        summary="Matrix products and weights in fp16 (with loss scaling) or bf16; fp32 masters and optimizer state.",
        source="[R, S]",
        precedence=Precedence.PRECISION,
        options=MixedPrecisionFlags,
        on={"mixed_precision": "bf16"},
        predicts=Prediction(
            {
                "parameters": "16 bits, except where a switch keeps them in fp32",
                "gradients": "with ZeRO, in 16 bits",
                "optimizer": "with fp32 masters of 16-bit weights",
                "activations": "products in 16 bits, with the copies of autocast",
                "time": "products at the rate of that precision",
            }
        ),
        notes=_notes,
        engine_options=_options,
        receipt=("parameter_dtypes", "activation_dtypes"),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
    Switch(
        name="tf32",
        summary="fp32 matrix products through the tensor cores' tf32.",
        source="[S]",
        precedence=Precedence.KERNEL,
        options=Tf32Flags,
        predicts=Prediction(
            unknown=always(time="products are as fast as DEVICE_TFLOPS says, which is assumed for fp32 without tf32")
        ),
        transform="rapidformer_templates.switches.mixed_precision:allow_tf32",
        receipt=("matmul_precision",),
        acted=_tf32_acted,
        changes_result=True,
        rules=tuple(TF32_RULES),
    ),
)
