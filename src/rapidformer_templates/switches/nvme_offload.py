"""NVMe offload (ZeRO-Infinity): optimizer state and parameters on a local disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rapidformer_templates.planning.checks import OPTIMIZER_HAS_CPU_FORM
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Example,
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
    drop,
)


@dataclass(frozen=True)
class NvmeOffloadFlags:
    """Acceleration"""

    nvme_path: str | None = flag(
        None, "ZeRO-Infinity: optimizer state and parameters on this disk", metavar="DIR", choice="offload"
    )


RULES = RuleList()


@RULES.add(
    "RF011",
    "NVMe offload needs ZeRO-3.",
    "DeepSpeed swaps to disk only what ZeRO-3 has partitioned",
    "[D]",
    Example("--nvme-path /local_nvme --zero-2-memory-optimization --world-size 2"),
    refusal="Offload to NVMe without ZeRO-3.",
)
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


@RULES.add(
    "RF115",
    "An average of the weights is kept in memory.",
    "DeepSpeed swaps only the moments of a part from the disk and back",
    "[deepspeed]",
    Example("--ema-decay 0.999 --nvme-path /local_nvme --zero-3-memory-optimization --world-size 2"),
    refusal="A moving average of the weights together with NVMe offload.",
)
def _moves_moments_alone(request: Request) -> list[Finding]:
    if "nvme-offload" not in request.active or request.config.training.ema_decay is None:
        return []
    message = "the average of the weights is stored next to the optimizer's moments, and nvme-offload moves only those"
    values = (*request.asked("ema_decay"), *request.asked_for("nvme-offload"))
    return [Finding(message, values, switches=("nvme-offload",), changes=(drop({"ema_decay": None}),))]


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
        rules=(*RULES, OPTIMIZER_HAS_CPU_FORM),
    ),
)
