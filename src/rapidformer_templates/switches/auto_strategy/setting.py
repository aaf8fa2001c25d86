"""Everything in a plan that affects the memory of a run, except its layout. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.settings import LEAST, fill_bucket_sizes
from rapidformer_templates.planning.optimizer_states import BF16, FP32
from rapidformer_templates.planning.optimizers import CLASSES
from rapidformer_templates.planning.plan import ContextKind, Plan
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.state_bytes import KEPT_WHOLE, PLAIN, StateOptions

WIDTHS = {"fp32": FP32, "bf16": BF16}


@dataclass(frozen=True)
class MasterWeights:
    """16-bit weights with fp32 masters. The attributes are bytes per element of their gradients.

    Attributes:
        accumulate: when added up over micro batches.
        reduce: when summed over replicas.
    """

    accumulate: int = FP32
    reduce: int = FP32


@dataclass(frozen=True)
class MemoryOptions:
    """Everything that the bytes of a worker depend on, except the model and the layout.

    Attributes:
        precision: type of matrix products: ``fp32``, ``bf16`` or ``fp16``.
        gpu: whether a worker is a GPU. If so, offloaded data does not use its memory.
        how: the optimizer's state, and ZeRO-3's sizes.
        offload: where the optimizer is offloaded, ``cpu`` or ``nvme``. Empty means that it is not.
        bucket: elements of ZeRO's gradient buffer.
        offloads_activations: whether activations that the blocks keep go to the host.
        reshards: whether FSDP frees a block's whole parameters between forward and backward.
        masters: 16-bit weights with masters. None leaves weights unchanged, or as DeepSpeed and FSDP convert them.
        context_kind: how attention covers divided sequences. None: the number of heads decides.
        updates_in_chunks: whether the optimizer accepts some gradients before others.
        updates_elementwise: whether the optimizer accepts pieces of parameters.
    """

    precision: str = "fp32"
    gpu: bool = False
    how: StateOptions = PLAIN
    offload: str = ""
    bucket: int = LEAST
    reshards: bool = True
    masters: MasterWeights | None = None
    offloads_activations: bool = False
    updates_in_chunks: bool = True
    updates_elementwise: bool = True
    context_kind: ContextKind | None = None

    def by_parallel_engine(self, layout: Layout) -> bool:
        """Whether the engine of 3D layouts trains it.

        Only this engine has masters and exchanges gradients in buckets.
        """
        has_own_engine = layout.experts > 1 and (layout.partitioning not in ("none", "fsdp") or self.offload != "")
        return self.masters is not None or layout.is_divided or has_own_engine


def memory_options_of(plan: Plan, width: int) -> MemoryOptions:
    """Return the setting of a resolved run.

    Args:
        width: width of the model, which determines ZeRO's buckets.
    """
    options = plan.engine_options
    zero: dict[str, Any] = fill_bucket_sizes(options.deepspeed.get("zero_optimization", {}), width)
    optimizer = CLASSES[plan.optimizer_implementation]
    rule = optimizer.state
    if spelling("ema_decay") in plan.values:
        rule = rule.with_average()
    if spelling("layerwise_lr_decay") in plan.values:
        rule = rule.with_rates()
    how = StateOptions(
        rule,
        kept_whole=zero.get("stage3_param_persistence_threshold", KEPT_WHOLE),
        sub_group=zero.get("sub_group_size"),
    )
    types = options.master_weights
    masters = None if types is None else MasterWeights(WIDTHS[types.accumulate], WIDTHS[types.reduce])
    return MemoryOptions(
        precision=plan.precision,
        gpu=plan.device != "cpu",
        how=how,
        offload=options.offload or "",
        bucket=zero.get("reduce_bucket_size", LEAST),
        reshards=options.parameter_sharding.reshard_after_forward,
        masters=masters,
        offloads_activations="offload-activations" in plan.switches,
        updates_in_chunks=optimizer.per_parameter,
        updates_elementwise=optimizer.elementwise,
        context_kind=options.context_kind,
    )
