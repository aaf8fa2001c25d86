"""TF32: fp32 matrix products with a 10-bit mantissa, on the tensor cores of Ampere and newer GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer_templates.planning.environment import AMPERE
from rapidformer_templates.planning.flags import flag
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


@dataclass(frozen=True)
class Tf32Flags:
    """Acceleration"""

    tf32: bool = flag(False, "fp32 matrix products through the tensor cores' tf32 (Ampere or newer)")


RULES = RuleList()


@RULES.add("RF018", "[S, torch]", "--tf32")
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


def _acted(measured: Measured) -> str | None:
    precision = measured["matmul_precision"]
    return None if precision == "high" else f"fp32 matrix products of precision high were expected; it is {precision}"


SWITCHES = (
    Switch(
        name="tf32",
        summary="fp32 matrix products through the tensor cores' tf32.",
        source="[S]",
        precedence=Precedence.KERNEL,
        options=Tf32Flags,
        predicts=Prediction(
            unknown=always(time="products are as fast as DEVICE_TFLOPS says, which is assumed for fp32 without tf32")
        ),
        transform="rapidformer_templates.switches.tf32:allow_tf32",
        receipt=("matmul_precision",),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
