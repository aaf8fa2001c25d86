"""NVMe offload (ZeRO-Infinity): optimizer state and parameters on a local disk."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._changes import add
from rapidformer_templates.switches._switch import Example, Finding, Request, Resource, Rule, Stage, Switch
from rapidformer_templates.switches.cpu_offload import OPTIMIZER_HAS_CPU_FORM


@dataclass(frozen=True)
class NvmeOffloadFlags:
    """Acceleration"""

    nvme_path: str | None = flag(None, "ZeRO-Infinity: optimizer state and parameters on this disk", metavar="DIR")


def _needs_zero_3(request: Request) -> list[Finding]:
    if "zero-3" in request.active:
        return []
    return [
        Finding(
            "nvme-offload needs zero-3",
            request.asked_for("nvme-offload"),
            switches=("nvme-offload",),
            changes=(add({"zero_3_memory_optimization": True}),),
        )
    ]


SWITCH = Switch(
    name="nvme-offload",
    summary="Optimizer state and parameters on a local disk (ZeRO-Infinity).",
    source="[D]",
    stage=Stage.SHARD,
    options=NvmeOffloadFlags,
    active=lambda options, sizes: options.nvme_path is not None,
    on={"nvme_path": "/local_nvme"},
    off={"nvme_path": None},
    family="offload",
    claims=frozenset({Resource.OFFLOAD}),
    engine_options=lambda request: {"offload": f"nvme:{request.config.get('nvme_path')}"},
    receipt=("optimizer_state_bytes", "optimizer_class"),
    rules=(
        Rule(
            "RF011",
            "NVMe offload needs ZeRO-3.",
            "DeepSpeed swaps to disk only what ZeRO-3 has partitioned",
            "[D]",
            _needs_zero_3,
            Example("--nvme-path /local_nvme --zero-2-memory-optimization --world-size 2"),
        ),
        OPTIMIZER_HAS_CPU_FORM,
    ),
)
