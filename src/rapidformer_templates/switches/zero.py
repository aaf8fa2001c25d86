"""ZeRO-1, -2 and -3: partition the model's states over the data-parallel workers with DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._checks import PARTITIONING, needs_template
from rapidformer_templates.switches._switch import Example, Resource, Rule, Stage, Switch

DEEPSPEED = {"needs_package": "deepspeed", "install": "pip install 'rapidformer_templates[deepspeed]'"}


@dataclass(frozen=True)
class Zero1Flags:
    """Acceleration"""

    zero_1_memory_optimization: bool = flag(False, "ZeRO-1: shard the optimizer state (DeepSpeed)")


@dataclass(frozen=True)
class Zero2Flags:
    """Acceleration"""

    zero_2_memory_optimization: bool = flag(False, "ZeRO-2: shard optimizer state and gradients (DeepSpeed)")


@dataclass(frozen=True)
class Zero3Flags:
    """Acceleration"""

    zero_3_memory_optimization: bool = flag(
        False, "ZeRO-3: shard optimizer state, gradients and parameters (DeepSpeed)"
    )


ONLY_IN_TRAINER = Rule(
    "RF002",
    "ZeRO needs the Trainer template.",
    "ZeRO partitions through DeepSpeed, which owns the optimizer step",
    "[R]",
    needs_template("zero-1", "zero-2", "zero-3"),
    Example("--template Finetuner --zero-3-memory-optimization --world-size 2"),
)


def _zero(level: int, options: type, states: str, claims: frozenset[Resource]) -> Switch:
    name = f"zero_{level}_memory_optimization"
    package: Mapping[str, Any] = DEEPSPEED
    return Switch(
        name=f"zero-{level}",
        summary=f"Shard {states} (DeepSpeed).",
        source="[R, D]",
        stage=Stage.SHARD,
        options=options,
        active=lambda options, sizes: getattr(options, name),
        on={name: True},
        off={name: False},
        family=PARTITIONING,
        claims=claims,
        templates=("Trainer",),
        rules=(ONLY_IN_TRAINER,),
        available=False,
        **package,
    )


_STATE = frozenset({Resource.OPTIMIZER_STATE})
_GRADIENTS = _STATE | {Resource.GRADIENTS}

SWITCHES = (
    _zero(1, Zero1Flags, "optimizer state", _STATE),
    _zero(2, Zero2Flags, "optimizer state and gradients", _GRADIENTS),
    _zero(3, Zero3Flags, "parameters, gradients and optimizer state", _GRADIENTS | {Resource.PARAMETERS}),
)
