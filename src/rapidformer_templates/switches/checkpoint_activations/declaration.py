"""Activation checkpointing: keep only each block's input, and recompute the rest in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Measured, Precedence, Prediction, Reasons, Request, Switch


@dataclass(frozen=True)
class CheckpointActivationsFlags:
    """Acceleration"""

    checkpoint_activations: bool = flag(
        False, "keep only each block's input and recompute the rest (about 20 % slower)", usual=True
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "with recomputation: full recomputes all of a block; selective keeps its products with weights and recomputes "
        "what is cheap for its size: attention, norms, activations, dropout (default: full)",
        aliases={"recompute-activations": "selective"},
        only_with=("checkpoint_activations", True),
    )
    recompute_num_layers: int | None = flag(
        None,
        "recompute only the first N blocks of a worker (in a pipeline, of its stage)",
        metavar="N",
        minimum=1,
        only_with=("checkpoint_activations", True),
    )


def _adopt(config: RunConfig) -> RunConfig:
    """Turn recomputation on if an option of it is given."""
    for name in ("recompute_granularity", "recompute_num_layers"):
        if config.get(name) is not None and "checkpoint_activations" not in config.origins:
            config = config.replace(config.origin(name), checkpoint_activations=True)
    return config


def _unknown(request: Request) -> Reasons:
    if request.config.get("recompute_num_layers") is None:
        return {}
    return dict.fromkeys(("activations", "time"), "all blocks are assumed to be recomputed, not only the first")


def _notes(request: Request) -> Sequence[str]:
    blocks = request.config.get("recompute_num_layers")
    which = "every block" if blocks is None else f"the first {blocks} blocks of a worker"
    selective = request.config.get("recompute_granularity") == "selective"
    what = "all but its products with weights" if selective else "everything after its input"
    return (f"checkpoint-activations: {which} recomputes {what}",)


def _acted(measured: Measured) -> str | None:
    saved, without = sum(measured.all("saved_tensor_bytes")), sum(measured.all("saved_tensor_bytes_without"))
    if saved < without:
        return None
    return f"fewer bytes kept for the backward than the {without:,} without it were expected; there are {saved:,}"


SWITCHES = (
    Switch(
        name="checkpoint-activations",
        summary="Keep only each block's input and recompute the rest in the backward pass.",
        source="[R, M, S]",
        precedence=Precedence.CHECKPOINT,
        options=CheckpointActivationsFlags,
        adopt=_adopt,
        notes=_notes,
        predicts=Prediction(
            {"activations": "one hidden state per block, and those of the block at work", "time": "another forward"},
            _unknown,
        ),
        transform="rapidformer_templates.switches.checkpoint_activations.transform:checkpoint_activations",
        receipt_hooks="rapidformer_templates.switches.checkpoint_activations.transform:SavedTensors",
        receipt=("saved_tensor_bytes", "saved_tensor_bytes_without"),
        acted=_acted,
    ),
)
