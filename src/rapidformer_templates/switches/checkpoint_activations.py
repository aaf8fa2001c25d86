"""Activation checkpointing: keep only each block's input, and compute the rest again in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._switch import Stage, Switch


@dataclass(frozen=True)
class CheckpointActivationsFlags:
    """Acceleration"""

    checkpoint_activations: bool = flag(
        False, "keep each block's input only and recompute the rest (about 20 % slower)", alias="recompute-activations"
    )


SWITCH = Switch(
    name="checkpoint-activations",
    summary="Keep each block's input only and recompute the rest in the backward pass.",
    source="[R, M, S]",
    stage=Stage.CHECKPOINT,
    options=CheckpointActivationsFlags,
    active=lambda options, sizes: options.checkpoint_activations,
    on={"checkpoint_activations": True},
    off={"checkpoint_activations": False},
    transform="rapidformer_templates.engines.transforms:checkpoint_activations",
    receipt=("saved_tensor_bytes", "saved_tensor_bytes_without"),
)
