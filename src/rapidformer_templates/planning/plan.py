"""Plan: what a run will do, decided before any worker starts. Written to ``plan.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PARALLEL_ENGINE = "rapidformer_templates.engines.parallel.engine:ParallelEngine"
"""That of 3D layouts."""


@dataclass(frozen=True)
class Sizes:
    """How the workers and the batch divide.

    ``world = tensor × context × pipeline × data``; ``global_batch = micro_batch × data × accumulation``.
    Batches are counted in samples, accumulation in micro batches of one optimizer step.
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
        """Workers of one replica of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def copies(self) -> int:
        """Workers that have the same parameters."""
        return self.data * self.context


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that exchange with one another, as rank 0 sees them; the others are in groups of the same size.

    Attributes:
        name: the dimension: ``tensor``, ``context``, ``data``, ``pipeline``, or that of a switch.
        exchanges: what they send to one another.
        size: workers of a group.
        stride: from the rank of one of them to that of the next.
        nodes: over how many nodes a group reaches, the one that reaches furthest.
    """

    name: str
    exchanges: str
    size: int
    stride: int
    nodes: int


@dataclass(frozen=True)
class Plan:
    """A resolved run.

    Attributes:
        template: ``Trainer``, ``Pretrainer`` or ``Finetuner``.
        switches: names of the active switches in the order in which they are applied.
        sizes: workers and batches.
        engine: ``module:Class`` of the engine that owns the optimizer step.
        engine_options: what the active switches tell it: plain values.
        device: ``cpu``, or what torch calls the accelerator.
        precision: ``fp32``, ``bf16`` or ``fp16``: the type that matrix products are computed in.
        optimizer: the optimizer that was asked for.
        optimizer_implementation: what stands for it here, such as ``torch.optim.AdamW (fused)``.
        optimizer_options: options of that class beside the learning rate and the weight decay.
        schedule: the type and parameters of a schedule that takes the place of ``--lr-decay-style``.
        notes: what a user should know: stand-ins, kernels, sizes that act as none.
        values: each flag that was given, with its value and where it came from.
        rules: codes of the rules that were consulted.
        groups: those that rank 0 is in.
    """

    template: str
    switches: tuple[str, ...] = ()
    sizes: Sizes = Sizes()
    engine: str = "rapidformer_templates.engines.local:SingleEngine"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    precision: str = "fp32"
    optimizer: str = "apex_adam"
    optimizer_implementation: str = "torch.optim.AdamW (fused)"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    groups: tuple[WorkerGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
