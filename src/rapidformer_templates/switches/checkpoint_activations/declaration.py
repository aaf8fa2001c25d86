"""Activation checkpointing: keep only each block's input, and compute the rest again in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Measured, Precedence, Prediction, Switch


@dataclass(frozen=True)
class CheckpointActivationsFlags:
    """Acceleration"""

    checkpoint_activations: bool = flag(
        False,
        "keep each block's input only and recompute the rest (about 20 % slower)",
        aliases={"recompute-activations": None},
    )


def _acted(measured: Measured) -> str | None:
    kept, without = sum(measured.all("saved_tensor_bytes")), sum(measured.all("saved_tensor_bytes_without"))
    if kept < without:
        return None
    return f"fewer bytes kept for the backward than the {without:,} without it were expected; there are {kept:,}"


SWITCHES = (
    Switch(
        name="checkpoint-activations",
        summary="Keep each block's input only and recompute the rest in the backward pass.",
        source="[R, M, S]",
        precedence=Precedence.CHECKPOINT,
        options=CheckpointActivationsFlags,
        predicts=Prediction(
            {"activations": "one hidden state a block, and those of the block at work", "time": "another forward"}
        ),
        transform="rapidformer_templates.switches.checkpoint_activations.transform:checkpoint_activations",
        receipt_hooks="rapidformer_templates.switches.checkpoint_activations.receipt:SavedTensors",
        receipt=("saved_tensor_bytes", "saved_tensor_bytes_without"),
        acted=_acted,
    ),
)
