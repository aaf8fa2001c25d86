"""Mixed precision: matrix products in 16 bits, weights and optimizer state in 32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rapidformer_templates.planning.acted import shown
from rapidformer_templates.planning.changes import replace
from rapidformer_templates.planning.checks import needs_template
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Rule,
    Switch,
)

AMPERE = (8, 0)  # the first compute capability with bf16 and tf32 units


@dataclass(frozen=True)
class MixedPrecisionFlags:
    """Acceleration"""

    mixed_precision: Literal["fp16", "bf16"] | None = flag(
        None,
        "16-bit matrix products; alone: fp16 on a GPU, bf16 on a CPU",
        bare="auto",
        aliases={"fp16": "fp16", "bf16": "bf16"},
        metavar="fp16|bf16",
    )


def _notes(request: Request) -> Sequence[str]:
    if request.config.get("mixed_precision") != "auto":
        return ()
    chosen = precision(request.config, request.environment)
    return (
        f"--mixed-precision without a type: {chosen}, because the device is a {request.environment.device.upper()}",
    )


def _bf16_before_ampere(request: Request) -> list[Finding]:
    capability = request.environment.compute_capability
    if capability is None or capability >= AMPERE or precision(request.config, request.environment) != "bf16":
        return []
    return [
        Finding(
            f"bf16 needs a GPU of compute capability 8.0 or newer; this one has {capability[0]}.{capability[1]}",
            request.asked("mixed_precision"),
            switches=("mixed-precision",),
            changes=(replace({"mixed_precision": "fp16"}, "scales the loss, as the smaller range of fp16 needs"),),
        )
    ]


def _acted(measured: Measured) -> str | None:
    wanted = {"bf16": "bfloat16", "fp16": "float16"}[measured.plan.precision]
    seen = sorted({kind for kinds in measured.all("activation_dtypes") for kind in kinds})
    return None if wanted in seen else f"activations in {wanted} were expected; modules put out {shown(seen)}"


SWITCHES = (
    Switch(
        name="mixed-precision",
        summary="Matrix products in fp16 (with loss scaling) or bf16; weights and optimizer state stay fp32.",
        source="[R, S]",
        precedence=Precedence.PRECISION,
        options=MixedPrecisionFlags,
        on={"mixed_precision": "bf16"},
        predicts=Prediction(
            {
                "parameters": "of ZeRO in 16 bits",
                "gradients": "of ZeRO in 16 bits",
                "activations": "products in 16 bits, with what autocast copies",
                "time": "products at the rate of that precision",
            }
        ),
        notes=_notes,
        receipt=("parameter_dtypes", "activation_dtypes"),
        acted=_acted,
        changes_result=True,
        rules=(
            Rule(
                "RF001",
                "Mixed precision needs one of the three templates.",
                "the template's engine casts and scales the loss; a loop of your own does neither",
                "[R]",
                needs_template("mixed-precision"),
                Example("--mixed-precision bf16", machine={"template": None}),
            ),
            Rule(
                "RF019",
                "bf16 on a GPU needs compute capability 8.0.",
                "older GPUs have no bf16 matrix units and emulate them more slowly than fp32",
                "[torch, S]",
                _bf16_before_ampere,
                Example("--mixed-precision bf16", machine={"device": "cuda", "compute_capability": (7, 0)}),
            ),
        ),
    ),
)
