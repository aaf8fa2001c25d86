"""FSDP: torch's ``fully_shard``, a transformer block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._checks import PARTITIONING
from rapidformer_templates.switches._switch import Request, Resource, Stage, Switch


@dataclass(frozen=True)
class FsdpFlags:
    """Acceleration"""

    fsdp_memory_optimization: bool = flag(
        False, "FSDP: shard optimizer state, gradients and parameters (torch fully_shard)"
    )


def _notes(request: Request) -> Sequence[str]:
    return ("fsdp: one worker, so there is nothing to shard",) if request.sizes.data == 1 else ()


SWITCH = Switch(
    name="fsdp",
    summary="Shard parameters, gradients and optimizer state, a block at a time (torch fully_shard).",
    source="[R]",
    stage=Stage.SHARD,
    options=FsdpFlags,
    active=lambda options, sizes: options.fsdp_memory_optimization,
    on={"fsdp_memory_optimization": True},
    off={"fsdp_memory_optimization": False},
    family=PARTITIONING,
    claims=frozenset({Resource.OPTIMIZER_STATE, Resource.GRADIENTS, Resource.PARAMETERS}),
    notes=_notes,
    engine="rapidformer_templates.engines.fsdp:FSDPEngine",
    receipt=("parameter_bytes", "parameter_bytes_whole", "optimizer_state_bytes"),
)
