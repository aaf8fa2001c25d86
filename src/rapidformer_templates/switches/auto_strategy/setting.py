"""What a plan says of the memory of a run besides its layout. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.buckets import LEAST, filled
from rapidformer_templates.planning.optimizers import updates_apart, updates_elements
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.optimizer_states import BF16, FP32, STATES
from rapidformer_templates.switches.auto_strategy.state_bytes import KEPT_WHOLE, PLAIN, How

WIDTHS = {"fp32": FP32, "bf16": BF16}


@dataclass(frozen=True)
class NarrowWeights:
    """Weights of 16 bits with fp32 masters; of a number of their gradients, the bytes.

    Attributes:
        accumulate: added up over micro batches.
        reduce: summed over replicas.
    """

    accumulate: int = FP32
    reduce: int = FP32


@dataclass(frozen=True)
class Setting:
    """What the bytes of a worker depend on besides the model and the layout.

    Attributes:
        precision: ``fp32``, ``bf16`` or ``fp16``: what the products are computed in.
        gpu: whether a worker is a GPU, whose memory what is offloaded does not take.
        how: the optimizer's state, and ZeRO-3's sizes.
        offload: ``cpu`` or ``nvme`` where the optimizer lies there, else empty.
        bucket: elements of ZeRO's buffer for gradients.
        offloads_activations: whether what the blocks keep goes to the host.
        reshards: whether FSDP gives up a block's whole parameters between forward and backward.
        narrow: weights of 16 bits with masters; None leaves them as they are, or as DeepSpeed and FSDP have them.
        context_kind: how attention sees divided sequences; None where the heads say so.
        updates_apart: whether the optimizer may be given some gradients before others.
        updates_elements: whether it may be given runs of parameters.
    """

    precision: str = "fp32"
    gpu: bool = False
    how: How = PLAIN
    offload: str = ""
    bucket: int = LEAST
    reshards: bool = True
    narrow: NarrowWeights | None = None
    offloads_activations: bool = False
    updates_apart: bool = True
    updates_elements: bool = True
    context_kind: str | None = None

    def by_parallel_engine(self, layout: Layout) -> bool:
        """Whether the engine of 3D layouts trains it, which alone has masters, and exchanges gradients in windows."""
        apart = layout.experts > 1 and (layout.partitioning not in ("none", "fsdp") or self.offload != "")
        return self.narrow is not None or layout.is_divided or apart


def setting_of(plan: Plan, width: int) -> Setting:
    """The setting of a resolved run.

    Args:
        width: of the model, which ZeRO's buckets follow.
    """
    zero: dict[str, Any] = filled(plan.engine_options.get("deepspeed", {}).get("zero_optimization", {}), width)
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
    asked: dict[str, str] | None = plan.engine_options.get("narrow_weights")
    narrow = None if asked is None else NarrowWeights(WIDTHS[asked["accumulate"]], WIDTHS[asked["reduce"]])
    return Setting(
        precision=plan.precision,
        gpu=plan.device != "cpu",
        how=how,
        offload=str(plan.engine_options.get("offload", "")).partition(":")[0],
        bucket=zero.get("reduce_bucket_size", LEAST),
        reshards=plan.engine_options.get("fsdp_reshard_after_forward", True),
        narrow=narrow,
        offloads_activations="offload-activations" in plan.switches,
        updates_apart=updates_apart(plan.optimizer_implementation),
        updates_elements=updates_elements(plan.optimizer_implementation),
        context_kind=plan.engine_options.get("context_kind"),
    )
