"""Plan: what a run will do, decided before any worker starts. Written to ``plan.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict

from rapidformer_templates.planning.deepspeed_file.file import Section
from rapidformer_templates.planning.schedules import FileSchedule

PARALLEL_ENGINE = "rapidformer_templates.engines.parallel.engine:ParallelEngine"
"""The engine of 3D layouts."""
FSDP_ENGINE = "rapidformer_templates.switches.fsdp.engine:FSDPEngine"
PIPELINE_FSDP_ENGINE = "rapidformer_templates.switches.fsdp.pipeline:PipelineFSDPEngine"
"""The engines that shard parameters, too."""

AttentionKernel = Literal["flash", "flash_attn", "efficient"]
"""Kernels of flash attention: torch's, that of the package, and torch's memory-efficient one."""
ContextKind = Literal["all-to-all", "ring"]
"""How attention sees the whole of a sequence that is divided over workers."""


@dataclass(frozen=True)
class Sizes:
    """How the workers and the batch are divided.

    ``world = tensor × context × pipeline × data`` and ``global_batch = micro_batch × data × accumulation``. Batches are
    counted in samples, accumulation in micro batches per optimizer step.
    """

    world: int = 1
    local_world: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    accumulation: int = 1
    context: int = 1

    @property
    def divides(self) -> int:
        """Number of workers in one replica of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def copies(self) -> int:
        """Number of workers that have the same parameters."""
        return self.data * self.context


@dataclass(frozen=True)
class Dimension:
    """A way to divide the workers into groups of equal size, which communicate with one another.

    Attributes:
        name: ``tensor``, ``context``, ``data``, ``pipeline``, or the name that a switch gives.
        exchanges: what the workers of a group send to one another.
        size: number of workers in a group.
        stride: difference between the ranks of neighbors in a group.
        nodes: maximum number of nodes that a group spans. :func:`groups_of` counts them.
    """

    name: str
    exchanges: str
    size: int
    stride: int = 1
    nodes: int = 1


@dataclass(frozen=True)
class MasterTypes:
    """The types of the gradients of 16-bit weights with fp32 masters.

    Attributes:
        accumulate: in which the gradients of micro batches are added up.
        reduce: in which workers send them to one another.
    """

    accumulate: Literal["fp32", "bf16"]
    reduce: Literal["fp32", "bf16"]


@dataclass(frozen=True)
class ParameterSharding:
    """How an engine shards parameters over the workers.

    Attributes:
        shard_size: number of workers that share one copy of the states. None means all workers.
        reshard_after_forward: whether a block's whole parameters are freed between forward and backward.
        reduce_dtype: the type in which gradients are summed. None means fp32.
        reduce_every_micro_batch: whether only shards of gradients are kept between micro batches.
    """

    shard_size: int | None = None
    reshard_after_forward: bool = True
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_every_micro_batch: bool = True


@dataclass(frozen=True)
class EngineOptions:
    """Options that the active switches set for the engine and the transforms.

    Attributes:
        shard_over_data: what the engine of 3D layouts shards over the data-parallel workers.
        master_weights: the gradients of 16-bit weights with fp32 masters. None if the weights keep their type.
        offload: where the optimizer state is stored.
        deepspeed: DeepSpeed's configuration. Empty if DeepSpeed does not train.
        parameter_sharding: how parameters are sharded.
        experts_over: number of workers that share the experts.
        compile_shapes: highest number of shapes of a training batch. 0 means unknown.
        attention_kernel: the kernel of flash attention.
        context_kind: how attention sees whole sequences. None: the number of heads decides.
    """

    shard_over_data: Literal["optimizer", "gradients", "parameters"] | None = None
    master_weights: MasterTypes | None = None
    offload: Literal["cpu", "nvme"] | None = None
    deepspeed: Section = field(default_factory=dict)
    parameter_sharding: ParameterSharding = ParameterSharding()
    experts_over: int = 1
    compile_shapes: int = 0
    attention_kernel: AttentionKernel | None = None
    context_kind: ContextKind | None = None

    def to_json(self) -> dict[str, object]:
        """Return the options that differ from the defaults."""
        defaults = asdict(EngineOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


class PlannedValue(TypedDict):
    """The value of a flag in the flag's own type, and where it came from, such as ``run.yaml:3``."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Plan:
    """A resolved run.

    Attributes:
        template: ``Trainer``, ``Pretrainer`` or ``Finetuner``.
        switches: names of the active switches in the order in which they are applied.
        sizes: workers and batches.
        engine: ``module:Class`` of the engine that owns the optimizer step.
        builds_in_shares: whether the workers divide the model while it is built. Otherwise each builds all of it.
        engine_options: options that the active switches set for the engine and the transforms.
        device: ``cpu``, or torch's name of the accelerator.
        precision: the type of matrix products: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: the optimizer that the user chose.
        optimizer_implementation: the class that implements it in this run, such as ``torch.optim.AdamW (fused)``.
        optimizer_options: options of that class other than learning rate and weight decay.
        schedule: the type and parameters of a schedule that replaces ``--lr-decay-style``.
        notes: what a user should know: fallbacks, kernels, sizes without effect.
        values: each flag that was given, with its value and where it came from.
        rules: codes of the rules that were checked.
        groups: the groups of workers that contain rank 0.
    """

    template: str
    switches: tuple[str, ...] = ()
    sizes: Sizes = Sizes()
    engine: str = "rapidformer_templates.engines.local:SingleEngine"
    builds_in_shares: bool = False
    engine_options: EngineOptions = EngineOptions()
    device: str = "cpu"
    precision: str = "fp32"
    optimizer: str = "adamw"
    optimizer_implementation: str = "torch.optim.AdamW (fused)"
    optimizer_options: Mapping[str, object] = field(default_factory=dict)
    schedule: FileSchedule | None = None
    notes: tuple[str, ...] = ()
    values: Mapping[str, PlannedValue] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    groups: tuple[Dimension, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"engine_options": self.engine_options.to_json()}


def groups_of(sizes: Sizes, more: Sequence[Dimension] = ()) -> tuple[Dimension, ...]:
    """Return the groups with more than one worker that contain rank 0.

    Args:
        more: dimensions of switches, in addition to tensor, context, data and pipeline parallelism.
    """
    neighbours = sizes.tensor * sizes.context
    dimensions = (
        Dimension("tensor", "sums inside a block", sizes.tensor),
        Dimension("context", "attention over a sequence; gradients", sizes.context, sizes.tensor),
        Dimension("data", "gradients, shares of states", sizes.data, neighbours),
        *more,
        Dimension("pipeline", "hidden states of a stage", sizes.pipeline, neighbours * sizes.data),
    )
    groups = []
    for dimension in dimensions:
        size, stride = dimension.size, dimension.stride
        if size > 1:
            firsts = [rank for rank in range(sizes.world) if rank // stride % size == 0]
            nodes = ({(first + i * stride) // sizes.local_world for i in range(size)} for first in firsts)
            groups.append(replace(dimension, nodes=max(map(len, nodes))))
    return tuple(groups)


def shards_of_experts(workers: int, size: int, over: int) -> int:
    """Return the number of workers that an expert is sharded over.

    Args:
        workers: number of all workers.
        size: number of workers in a group that shares everything else.
        over: number of workers that the experts are divided over. Each of them has different experts.
    """
    return math.gcd(workers // over, max(1, size // over))


def expert_shard_dim(shape: Sequence[int], workers: int) -> int:
    """Return the dimension along which a stack of experts is sharded, so that each worker has a part of every expert.

    If no width is divisible, each worker gets whole experts.
    """
    return next((dim for dim in range(1, len(shape)) if shape[dim] % workers == 0), 0)
