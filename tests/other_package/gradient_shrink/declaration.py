"""The declaration of the switch: when it is refused, and how the receipt shows that it acted. Does not import torch."""

from dataclasses import dataclass

from rapidformer_templates import flag
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, Rule, Switch


@dataclass(frozen=True)
class GradientShrinkFlags:
    """Acceleration"""

    embedding_gradient_shrink: float | None = flag(
        None, "multiply what the input sends back to the word embeddings by this", metavar="ALPHA"
    )


def _captured(request: Request) -> list[Finding]:
    if "onnx-runtime" not in request.active:
        return []
    names = ("gradient-shrink", "onnx-runtime")
    return [Finding("a captured graph cannot contain a custom gradient", request.asked_for(*names), names)]


def _acted(measured: Measured) -> str | None:
    wanted = measured.config.get("embedding_gradient_shrink")
    ratios = measured.all("embedding_gradient_ratio")
    if ratios and all(abs(ratio - wanted) < 0.01 for ratio in ratios):
        return None
    return f"embeddings that are given {wanted} of their gradient were expected; they are given {ratios or 'all of it'}"


SWITCHES = (
    Switch(
        name="gradient-shrink",
        summary="Multiply what the input sends back to the word embeddings by a factor (GLM-130B).",
        source="[gradient-shrink]",
        precedence=Precedence.KERNEL,
        options=GradientShrinkFlags,
        active=lambda options, sizes: options.embedding_gradient_shrink is not None,
        on={"embedding_gradient_shrink": 0.1},
        off={"embedding_gradient_shrink": None},
        predicts=Prediction({"activations": "another copy of the first hidden state, for a moment"}),
        transform="gradient_shrink.transform:shrink",
        receipt=("embedding_gradient_ratio",),
        receipt_hooks="gradient_shrink.receipt:Ratio",
        acted=_acted,
        changes_result=True,
        rules=(
            Rule(
                "GS001",
                "Shrunk gradients of embeddings are not captured.",
                "the graph of ONNX Runtime contains the forward, and its backward is made from it",
                "[gradient-shrink]",
                _captured,
                "--embedding-gradient-shrink 0.1 --onnx-runtime-training",
            ),
        ),
    ),
)
