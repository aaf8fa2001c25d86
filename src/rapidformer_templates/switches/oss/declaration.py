"""The oss and oss-sdp switches: partition optimizer state, or also gradients, with fairscale in every template."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.planning.checks import PARTITIONING, check_even_shards, idle_without_copies
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Precedence, Prediction, Resource, Switch

INSTALL = "pip install 'rapidformer_templates[fairscale]'"


@dataclass(frozen=True)
class OssFlags:
    """Acceleration"""

    oss_memory_optimization: bool = flag(False, "OSS: shard the optimizer state (fairscale)", choice=PARTITIONING)


@dataclass(frozen=True)
class OssSdpFlags:
    """Acceleration"""

    oss_sdp_memory_optimization: bool = flag(
        False, "OSS + SDP: shard optimizer state and gradients (fairscale)", choice=PARTITIONING
    )


SWITCHES = (
    Switch(
        name="oss",
        summary="Shard optimizer state (fairscale).",
        source="[R]",
        precedence=Precedence.SHARD,
        options=OssFlags,
        predicts=Prediction({"optimizer": "that of the parameters that a worker owns", "time": "sums, and weights"}),
        family=PARTITIONING,
        claims=frozenset({Resource.OPTIMIZER_STATE}),
        needs_package="fairscale",
        install=INSTALL,
        notes=idle_without_copies("oss: one worker, so there is nothing to shard"),
        engine="rapidformer_templates.switches.oss.engine:OSSEngine",
        receipt=("optimizer_state_bytes",),
        acted=check_even_shards(updated_elements="optimizer state"),
    ),
    Switch(
        name="oss-sdp",
        summary="Shard optimizer state and gradients (fairscale).",
        source="[R]",
        precedence=Precedence.SHARD,
        options=OssSdpFlags,
        predicts=Prediction(
            {
                "gradients": "those of the parameters that a worker owns",
                "optimizer": "that of the parameters that a worker owns",
                "activations": "no separate buckets",
                "time": "a sum at the owner, and weights from there",
            }
        ),
        family=PARTITIONING,
        claims=frozenset({Resource.OPTIMIZER_STATE, Resource.GRADIENTS}),
        needs_package="fairscale",
        install=INSTALL,
        notes=idle_without_copies("oss-sdp: one worker, so there is nothing to shard"),
        engine="rapidformer_templates.switches.oss.engine:SDPEngine",
        receipt=("optimizer_state_bytes", "gradient_bytes"),
        acted=check_even_shards(updated_elements="optimizer state", gradient_elements="gradients"),
    ),
)
