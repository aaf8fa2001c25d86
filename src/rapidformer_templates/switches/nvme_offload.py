"""NVMe offload (ZeRO-Infinity): optimizer state and parameters on a local disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rapidformer_templates.planning.checks import OFFLOAD_RULES, Given, clash, needs
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    RuleList,
    Switch,
    add,
    always,
)


@dataclass(frozen=True)
class NvmeOffloadFlags:
    """Acceleration"""

    nvme_path: str | None = flag(
        None, "ZeRO-Infinity: optimizer state and parameters on this disk", metavar="DIR", choice="offload"
    )


RULES = RuleList()


@RULES.add("RF011", "[D]", "--nvme-path /local_nvme --zero-2-memory-optimization --world-size 2")
def _needs_zero_3(request: Request) -> list[Finding]:
    """NVMe offload needs ZeRO-3.

    Why: DeepSpeed swaps to disk only what ZeRO-3 has partitioned.
    """
    return needs(request, "nvme-offload", "zero-3", add({"zero_3_memory_optimization": True}))


@RULES.add(
    "RF115", "[deepspeed]", "--ema-decay 0.999 --nvme-path /local_nvme --zero-3-memory-optimization --world-size 2"
)
def _moves_moments_alone(request: Request) -> list[Finding]:
    """An average of the weights is kept in memory.

    Why: DeepSpeed swaps only the moments of a part from the disk and back.
    """
    message = "the average of the weights is stored next to the optimizer's moments, and {1} moves only those"
    return clash(request, Given("ema_decay"), "nvme-offload", message=message)


SWAPPED = 2**20
"""DeepSpeed swaps a worker's share of a parameter group if it has at least this many bytes.

Smaller ones stay in memory.
"""


def _acted(measured: Measured) -> str | None:
    share = 4 * (measured["trained_elements"] or 0) / measured.plan.sizes.data
    if share < 2 * SWAPPED:  # there may be two groups, one with nearly all elements
        return None
    if any(measured.all("swapped_bytes")):
        return None
    return f"optimizer state in files below {measured.config.get('nvme_path')} was expected; there is none"


SWITCHES = (
    Switch(
        name="nvme-offload",
        summary="Optimizer state and parameters on a local disk (ZeRO-Infinity).",
        source="[D]",
        no_second_model="keeps parameters in the files of one model",
        precedence=Precedence.SHARD,
        options=NvmeOffloadFlags,
        on={"nvme_path": "/local_nvme"},
        predicts=Prediction(
            {
                "parameters": "in host memory on their way to the disk",
                "gradients": "those of small sub-groups, the rest on the disk",
                "optimizer": "that of small sub-groups, the rest on the disk",
            },
            always(time="the seconds do not include the transfers to the disk and back"),
        ),
        family="offload",
        freed_memory="given back",
        claims=frozenset({Resource.OFFLOAD}),
        engine_options=lambda request, options: replace(options, offload="nvme"),
        receipt=("optimizer_state_bytes", "optimizer_class", "swapped_bytes"),
        acted=_acted,
        rules=(*RULES, *OFFLOAD_RULES),
    ),
)
