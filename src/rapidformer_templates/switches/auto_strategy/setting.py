"""What a plan says of the memory of a run besides its layout. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.auto_strategy.optimizer_states import STATES
from rapidformer_templates.switches.auto_strategy.state_bytes import KEPT_WHOLE, PLAIN, How

REDUCE_BUCKET = 20_000_000
"""Elements of the buffer in which ZeRO gathers gradients, if a DeepSpeed file does not say otherwise."""


@dataclass(frozen=True)
class Setting:
    """What the bytes of a worker depend on besides the model and the layout.

    Attributes:
        precision: ``fp32``, ``bf16`` or ``fp16``: what the products are computed in.
        gpu: whether a worker is a GPU, whose memory what is offloaded does not take.
        how: the optimizer's state, and ZeRO-3's sizes.
        offload: ``cpu`` or ``nvme`` where the optimizer lies there, else empty.
        bucket: elements of ZeRO's buffer for gradients.
        divides_experts: expert parallelism.
        offloads_activations: whether what the blocks keep goes to the host.
        reshards: whether FSDP gives up a block's whole parameters between forward and backward.
    """

    precision: str = "fp32"
    gpu: bool = False
    how: How = PLAIN
    offload: str = ""
    bucket: int = REDUCE_BUCKET
    divides_experts: bool = False
    reshards: bool = True
    offloads_activations: bool = False


def setting_of(plan: Plan) -> Setting:
    """The setting of a resolved run."""
    zero: dict[str, Any] = plan.engine_options.get("deepspeed", {}).get("zero_optimization", {})
    rule = STATES[plan.optimizer_implementation]
    if spelling("ema_decay") in plan.values:
        rule = rule.with_average()
    if spelling("layerwise_lr_decay") in plan.values:
        rule = rule.with_rates()
    how = How(
        rule,
        kept_whole=zero.get("stage3_param_persistence_threshold", KEPT_WHOLE),
        sub_group=zero.get("sub_group_size"),
    )
    return Setting(
        precision=plan.precision,
        gpu=plan.device == "cuda",
        how=how,
        offload=str(plan.engine_options.get("offload", "")).partition(":")[0],
        bucket=zero.get("reduce_bucket_size", REDUCE_BUCKET),
        divides_experts="expert-parallel" in plan.switches,
        reshards=plan.engine_options.get("fsdp_reshard_after_forward", True),
        offloads_activations="offload-activations" in plan.switches,
    )
