"""Fused loss: compute the last layer's product and the cross-entropy together, without the logits of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.checks import Given, clash
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch
from rapidformer_templates.planning.tasks import tasks_with


@dataclass(frozen=True)
class FusedLossFlags:
    """Acceleration"""

    fused_linear_cross_entropy: bool = flag(
        False, "compute the loss over the vocabulary one chunk of tokens at a time: less memory, a little more time"
    )


def _notes(request: Request) -> Sequence[str]:
    liger = request.environment.device == "cuda" and "liger_kernel" in request.environment.packages
    kernel = "Liger's kernel" if liger and request.sizes.tensor == 1 else "chunks of torch's operations"
    return (f"fused-linear-cross-entropy: by {kernel}; a training step has no logits",)


RULES = RuleList()


@RULES.add("RF062", "[Liger]", "--fused-linear-cross-entropy --task sequence_classification")
def _scores_words(request: Request) -> list[Finding]:
    """The fused loss is for tasks that predict words.

    Why: it joins the product with the vocabulary and the cross-entropy over it; other tasks have neither.
    """
    others = Given("task", tasks_with(lambda task: not task.predicts_tokens), instead=())
    return clash(request, "fused-linear-cross-entropy", others, message="{1} has no loss over the vocabulary to fuse")


def _acted(measured: Measured) -> str | None:
    if any(measured.all("fused_loss_kernel")):
        return None
    return "a loss over the vocabulary from the fused kernel was expected; the last layer returned logits"


SWITCHES = (
    Switch(
        name="fused-linear-cross-entropy",
        summary="Loss over the vocabulary without the logits of all tokens.",
        source="[Liger]",
        precedence=Precedence.HEAD,
        options=FusedLossFlags,
        predicts=Prediction({"activations": "logits of one chunk of tokens at a time"}, traced=True),
        notes=_notes,
        transform="rapidformer_templates.switches.fused_loss.transform:fuse_loss",
        receipt_hooks="rapidformer_templates.switches.fused_loss.transform:LogitsInMemory",
        receipt=("logits_rows", "logits_rows_without", "fused_loss_kernel"),
        acted=_acted,
        rules=tuple(RULES),
    ),
)
