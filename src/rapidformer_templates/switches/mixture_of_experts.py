"""Mixture of experts: sparse gated feed-forwards, with a load-balancing loss."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._changes import replace
from rapidformer_templates.switches._switch import Example, Finding, Request, Rule, Stage, Switch


@dataclass(frozen=True)
class MixtureOfExpertsFlags:
    """Acceleration"""

    num_experts: int | None = flag(None, "replace feed-forwards by this many gated experts", metavar="N", minimum=1)
    moe_top_k: int | None = flag(None, "experts that each token visits (default: 2)", metavar="K", minimum=1)


def _experts_divide(request: Request) -> list[Finding]:
    experts, data = request.config.get("num_experts"), request.sizes.data
    if experts % data == 0 or data % experts == 0:
        return []
    above = -(-experts // data) * data
    return [
        Finding(
            f"{experts} experts cannot be shared out evenly over {data} data-parallel workers",
            (*request.asked("num_experts"), f"data-parallel size {data}"),
            switches=("mixture-of-experts",),
            changes=(
                replace({"num_experts": above}),
                *([replace({"num_experts": above - data})] if above > data else []),
            ),
        )
    ]


def _top_k_exists(request: Request) -> list[Finding]:
    experts, top_k = request.config.get("num_experts"), request.config.get("moe_top_k")
    if top_k is None or top_k <= experts:
        return []
    return [
        Finding(
            f"a token cannot visit {top_k} of {experts} experts",
            request.asked("moe_top_k", "num_experts"),
            switches=("mixture-of-experts",),
            changes=(replace({"moe_top_k": experts}),),
        )
    ]


SWITCH = Switch(
    name="mixture-of-experts",
    summary="Sparse gated feed-forwards with a load-balancing loss.",
    source="[R, S]",
    stage=Stage.STRUCTURE,
    options=MixtureOfExpertsFlags,
    active=lambda options, sizes: options.num_experts is not None,
    on={"num_experts": 8},
    off={"num_experts": None, "moe_top_k": None},
    available=False,
    rules=(
        Rule(
            "RF020",
            "The number of experts is a multiple or a divisor of the data-parallel size.",
            "each data-parallel worker holds as many experts, or each expert has as many replicas, as any other",
            "[deepspeed]",
            _experts_divide,
            Example("--num-experts 3 --world-size 2"),
        ),
        Rule(
            "RF027",
            "A token visits at most as many experts as there are.",
            "the gate chooses distinct experts",
            "[deepspeed]",
            _top_k_exists,
            Example("--num-experts 2 --moe-top-k 4"),
        ),
    ),
)
