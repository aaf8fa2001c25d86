"""Layouts of workers and batch, and the other options that memory depends on. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.file import section_at
from rapidformer_templates.planning.deepspeed_file.settings import LEAST, fill_bucket_sizes
from rapidformer_templates.planning.optimizer_states import BF16, FP32
from rapidformer_templates.planning.optimizers import CLASSES
from rapidformer_templates.planning.plan import ContextKind, Plan
from rapidformer_templates.switches.auto_strategy.state_bytes import KEPT_WHOLE, PLAIN, StateOptions

FlagValue: TypeAlias = bool | int | str | None

DISTRIBUTED, STRATEGY = "use_distributed_optimizer", "data_parallel_sharding_strategy"

PARTITIONINGS: Mapping[str, Mapping[str, FlagValue]] = {
    "none": {},
    "distributed-optimizer": {DISTRIBUTED: True, STRATEGY: "optim"},
    "zero-1": {"zero_1_memory_optimization": True},
    "zero-2": {"zero_2_memory_optimization": True},
    "oss": {"oss_memory_optimization": True},
    "oss-sdp": {"oss_sdp_memory_optimization": True},
    "fsdp": {"fsdp_memory_optimization": True},
    "zero-3": {"zero_3_memory_optimization": True},
    "sharding-strategy": {DISTRIBUTED: True, STRATEGY: "optim_grads_params"},
}
"""Ways to divide the model's states over the replicas, each with its flags. The fastest is first [D]."""

RECOMPUTED = ("none", "selective", "full")
"""Choices of activations that the backward recomputes. The fastest is first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout, and the memory savings it uses.

    Attributes:
        tensor: workers that share the matrices of each block.
        pipeline: stages that the blocks are cut into.
        data: replicas of the model.
        micro_batch: samples per forward.
        accumulation: micro batches per optimizer step on each replica.
        partitioning: a key of ``PARTITIONINGS``.
        recompute: which of each block's activations are recomputed, one of ``RECOMPUTED``.
        sequence_parallel: whether norms and dropout are divided along the sequence, too.
        shard_size: workers of a group that FSDP divides a copy of the states over. None means all replicas.
        stages: blocks of each stage. Empty means that they follow from the parameters.
        virtual: stages per pipeline worker. With more than one, they are interleaved.
        experts: replicas that one copy of the experts is divided over.
        context: workers that share each sequence.
        offload: whether activations that the blocks keep go to host memory.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    partitioning: str = "none"
    recompute: str = "none"
    sequence_parallel: bool = False
    stages: tuple[int, ...] = ()
    shard_size: int | None = None
    context: int = 1
    offload: bool = False
    virtual: int = 1
    experts: int = 1

    @property
    def replicas(self) -> int:
        """Workers with the same parameters, whose gradients are summed: data × context."""
        return self.data * self.context

    @property
    def shares(self) -> int:
        """Replicas that the partitioning divides one copy of the states over."""
        return self.shard_size or self.replicas

    @property
    def copies(self) -> int:
        """Number of copies of the states over all replicas, if they are partitioned."""
        return self.replicas // self.shares

    @property
    def of_states(self) -> Layout:
        """This layout without what the states of its workers do not depend on: batch sizes and recomputation."""
        return replace(self, micro_batch=1, accumulation=1, recompute="none")

    @property
    def partitioned(self) -> str:
        """The partitioning as a table shows it: ``fsdp / 8`` for groups of eight workers."""
        name = "fsdp in 3D" if self.shards_stages else self.partitioning
        return f"{name} / {self.shard_size}" if self.shard_size else name

    @property
    def pipelined(self) -> str:
        """The pipeline as a table shows it: ``4 · 2`` for four workers with two stages each."""
        return f"{self.pipeline} · {self.virtual}" if self.virtual > 1 else str(self.pipeline)

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def is_divided(self) -> bool:
        """Whether the engine of 3D layouts trains it, in any precision."""
        context = self.context > 1 and not self.as_fsdp
        return self.tensor * self.pipeline > 1 or context or self.partitioning == "distributed-optimizer"

    @property
    def shards_stages(self) -> bool:
        """Whether FSDP shards the parameters of a stage, or of a tensor-parallel worker."""
        return self.partitioning == "sharding-strategy" and self.tensor * self.pipeline > 1

    @property
    def as_fsdp(self) -> bool:
        """Whether FSDP shards the parameters of undivided models."""
        return self.partitioning == "fsdp" or (self.partitioning == "sharding-strategy" and not self.shards_stages)

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def bubble(self) -> float:
        """Share of the step in which a pipeline worker waits: (p - 1) / (v m + p - 1) (Narayanan et al., 2021)."""
        return (self.pipeline - 1) / (self.virtual * self.accumulation + self.pipeline - 1)

    def values(self) -> dict[str, FlagValue]:
        """Return the configuration fields that request this layout, including those that are off."""
        off: dict[str, FlagValue] = {name: False for flags in PARTITIONINGS.values() for name in flags}
        flags: dict[str, FlagValue] = {**off, STRATEGY: "optim", **PARTITIONINGS[self.partitioning]}
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_size": self.virtual,
            "expert_model_parallel_size": self.experts if self.experts > 1 else None,
            "context_parallel_size": self.context,
            "sequence_parallel": self.sequence_parallel,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.global_batch,
            "checkpoint_activations": self.recompute != "none",
            "recompute_granularity": "selective" if self.recompute == "selective" else None,
            **({"pipeline_stages": ",".join(map(str, self.stages))} if self.stages else {}),
            "fsdp_shard_size": self.shard_size,
            "offload_activations": self.offload,
            **flags,
        }

    def values_that_act(self, user_fields: Container[str] = ()) -> dict[str, FlagValue]:
        """Return the entries of :meth:`values` that differ from a plain run and that the user has not given."""
        batches = ("micro_batch_size", "global_batch_size")
        off = (None, False, 1, "optim")
        acting = {n: v for n, v in self.values().items() if n in batches or v is True or v not in off}
        return {name: value for name, value in acting.items() if name not in user_fields}

    def flags(self) -> list[str]:
        """Return the flags to add to the training command."""
        words: list[str] = []
        acting = self.values_that_act()
        if "recompute_granularity" in acting:
            del acting["checkpoint_activations"]  # it implies this flag
        for name, value in acting.items():
            words += [spelling(name)] if value is True else [spelling(name), str(value)]
        return words


def layout_of(plan: Plan) -> Layout:
    """Return the layout of a resolved run."""
    sizes, values = plan.sizes, {flag: entry["value"] for flag, entry in plan.values.items()}
    partitioning = next((name for name in PARTITIONINGS if name in plan.switches), "none")
    if plan.engine_options.shard_over_data == "parameters":
        partitioning = "sharding-strategy"
    granularity = values.get(spelling("recompute_granularity")) or "full"
    return Layout(
        sizes.tensor,
        sizes.pipeline,
        sizes.data,
        sizes.micro_batch,
        sizes.accumulation,
        partitioning,
        recompute=granularity if "checkpoint-activations" in plan.switches else "none",
        sequence_parallel="sequence-parallel" in plan.switches,
        shard_size=plan.engine_options.parameter_sharding.shard_size,
        context=sizes.context,
        offload="offload-activations" in plan.switches,
        virtual=values.get(spelling("virtual_pipeline_size")) or 1,
        experts=plan.engine_options.experts_over,
    )


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
        builds_in_shares: whether the workers divide the model while it is built.
        how: the optimizer's state, and ZeRO-3's sizes.
        offload: where the optimizer is offloaded, ``cpu`` or ``nvme``. Empty means that it is not.
        bucket: elements of ZeRO's gradient buffer.
        offloads_activations: whether activations that the blocks keep go to the host.
        reshards: whether FSDP frees a block's whole parameters between forward and backward.
        reduces_each: whether FSDP keeps only shards of gradients between micro batches.
        sums_early: whether the engine of 3D layouts keeps only shares of them.
        masters: 16-bit weights with masters. None leaves weights unchanged, or as DeepSpeed and FSDP convert them.
        context_kind: how attention covers divided sequences. None: the number of heads decides.
        updates_in_chunks: whether the optimizer accepts some gradients before others.
        updates_elementwise: whether the optimizer accepts pieces of parameters.
        fuses: whether the operations between two matrix products are compiled into a few kernels.
        fp8: whether linear layers of the blocks multiply in fp8.
        gathers_fp8: whether FSDP gathers their weights in fp8.
    """

    precision: str = "fp32"
    gpu: bool = False
    builds_in_shares: bool = False
    how: StateOptions = PLAIN
    offload: str = ""
    bucket: int = LEAST
    reshards: bool = True
    reduces_each: bool = True
    sums_early: bool = False
    masters: MasterWeights | None = None
    offloads_activations: bool = False
    updates_in_chunks: bool = True
    updates_elementwise: bool = True
    fuses: bool = False
    fp8: bool = False
    gathers_fp8: bool = False
    context_kind: ContextKind | None = None

    def by_parallel_engine(self, layout: Layout) -> bool:
        """Whether the engine of 3D layouts trains it.

        Only this engine has masters and exchanges gradients in buckets.
        """
        has_own_engine = (
            layout.experts > 1 and not layout.as_fsdp and (layout.partitioning != "none" or self.offload != "")
        )
        return self.masters is not None or layout.is_divided or has_own_engine


def memory_options_of(plan: Plan, width: int) -> MemoryOptions:
    """Return the setting of a resolved run.

    Args:
        width: width of the model, which determines ZeRO's buckets.
    """
    options = plan.engine_options
    zero: dict[str, Any] = fill_bucket_sizes(section_at(options.deepspeed, "zero_optimization"), width, plan.device)
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
        builds_in_shares=plan.builds_in_shares,
        how=how,
        offload=options.offload or "",
        # One buffer is filled while the other one is sent.
        bucket=zero.get("reduce_bucket_size", LEAST) * (2 if zero.get("overlap_comm") and zero["stage"] < 3 else 1),
        reshards=options.parameter_sharding.reshard_after_forward,
        reduces_each=options.parameter_sharding.reduce_every_micro_batch,
        sums_early=options.shard_over_data == "gradients",
        masters=masters,
        offloads_activations="offload-activations" in plan.switches,
        updates_in_chunks=optimizer.per_parameter,
        updates_elementwise=optimizer.elementwise,
        fuses="torch-compile" in plan.switches,
        fp8="fp8-products" in plan.switches,
        gathers_fp8=spelling("fp8_all_gather") in plan.values,
        context_kind=options.context_kind,
    )
