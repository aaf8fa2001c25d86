"""Plan: what a run will do, decided before any worker starts. Written to ``plan.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PARALLEL_ENGINE = "rapidformer_templates.engines.parallel.engine:ParallelEngine"
"""The engine of 3D layouts."""


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
class WorkerGroup:
    """Workers that communicate with one another, as seen from rank 0. The other groups have the same size.

    Attributes:
        name: the dimension: ``tensor``, ``context``, ``data``, ``pipeline``, or that of a switch.
        exchanges: what they send to one another.
        size: number of workers in a group.
        stride: difference between the ranks of neighbors in a group.
        nodes: maximum number of nodes that a group spans.
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
        engine_options: plain values that the active switches pass to the engine.
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
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    precision: str = "fp32"
    optimizer: str = "adamw"
    optimizer_implementation: str = "torch.optim.AdamW (fused)"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    groups: tuple[WorkerGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
