"""ONNX Runtime: its graph optimisations on the exported forward and backward graphs."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._switch import Example, Finding, Request, Resource, Rule, Stage, Switch


@dataclass(frozen=True)
class OnnxRuntimeFlags:
    """Acceleration"""

    onnx_runtime_training: bool = flag(False, "run forward and backward graphs in ONNX Runtime")


def _needs_whole_parameters(request: Request) -> list[Finding]:
    return [
        Finding(
            f"onnx-runtime does not work together with {switch.name}",
            request.asked_for("onnx-runtime", switch.name),
            switches=("onnx-runtime", switch.name),
        )
        for switch in request.active.values()
        if Resource.PARAMETERS in switch.claims
    ]


SWITCH = Switch(
    name="onnx-runtime",
    summary="Forward and backward graphs in ONNX Runtime.",
    source="[R]",
    stage=Stage.GRAPH,
    options=OnnxRuntimeFlags,
    active=lambda options, sizes: options.onnx_runtime_training,
    on={"onnx_runtime_training": True},
    off={"onnx_runtime_training": False},
    family="graph",
    claims=frozenset({Resource.GRAPH}),
    needs_package="onnxruntime",
    install="pip install 'rapidformer_templates[onnx]'",
    available=False,
    rules=(
        Rule(
            "RF017",
            "ONNX Runtime needs whole parameters: no FSDP, no ZeRO-3.",
            "the exported graphs take whole parameters, which these gather and free outside the graph",
            "[onnxruntime, torch]",
            _needs_whole_parameters,
            Example("--onnx-runtime-training --fsdp-memory-optimization --world-size 2"),
        ),
    ),
)
