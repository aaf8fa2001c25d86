"""Flash attention: torch's flash kernel, or the package ``flash_attn`` where it is installed."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._switch import Example, Finding, Request, Rule, Stage, Switch


@dataclass(frozen=True)
class FlashAttentionFlags:
    """Acceleration"""

    use_flash_attn: bool = flag(
        False, "flash attention in batches without padding, memory-efficient attention elsewhere"
    )


def _padded_batches(request: Request) -> list[Finding]:
    if request.config.training.task == "pretraining":
        return []  # packed: every sequence has the full length
    return [
        Finding(
            "flash-attention: batches with padding use the memory-efficient kernel", request.asked("use_flash_attn")
        )
    ]


SWITCH = Switch(
    name="flash-attention",
    summary="Attention without the matrix of scores (flash kernel).",
    source="[M, S]",
    stage=Stage.KERNEL,
    options=FlashAttentionFlags,
    active=lambda options, sizes: options.use_flash_attn,
    on={"use_flash_attn": True},
    off={"use_flash_attn": False},
    available=False,
    rules=(
        Rule(
            "RF013",
            "Flash attention only without a padding mask; with one, the memory-efficient kernel is used.",
            "the flash kernel takes no mask",
            "[S]",
            _padded_batches,
            Example("--use-flash-attn --task sequence_classification"),
            refuses=False,
        ),
    ),
)
