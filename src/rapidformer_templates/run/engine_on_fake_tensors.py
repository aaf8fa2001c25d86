"""The memory of a plan's own engine: it trains two steps on tensors without data, as one worker without its peers.

The model, the switches, the engine and the optimizer are built as in a run, so a change to any of them changes this
memory. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.engines.contract import bytes_by_kind
from rapidformer_templates.errors import ConfigError, ModelError, RapidformerError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.switch import Resource
from rapidformer_templates.run.building import build_engine
from rapidformer_templates.run.run import Run, Template
from rapidformer_templates.switches.auto_strategy.fake_world import counted_engine, known_links, lone_worker
from rapidformer_templates.switches.auto_strategy.results import Memory
from rapidformer_templates.switches.auto_strategy.trace import ENOUGH_ROUNDS
from rapidformer_templates.switches.auto_strategy.tracing import gpu_kernels, in_forks, with_gpu_kernels

ENOUGH_MICRO_BATCHES = 3
"""Micro batches without a pipeline: the first, one that is repeated, and the last."""

OFFLOADED = "offload-activations"


class PlannedModel(Protocol):
    """Builds the model of a plan, its batches and its loss. ``ModelSource`` of the planner documents each member."""

    def build(self, blocks: int | None) -> nn.Module: ...
    def batch(self, samples: int) -> Batch: ...
    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of a worker in an optimizer step.

    Attributes:
        rank: the worker.
        peak: the highest sum of live storages during the step.
        parameters, gradients, optimizer: its states, as in the receipts of a run: between two steps, and gradients
            before the update.
    """

    rank: int
    peak: int
    parameters: int
    gradients: int
    optimizer: int


def planned_memory(template: Template, source: PlannedModel, where: str, plan: Plan) -> Memory:
    """Return the memory of the worker that needs most, with the engine and the optimizer of the template.

    Switches that compile the graph are left out: they need values, and the planner does not predict their effect.

    Args:
        where: the flag or the hook that asks for it, for messages.

    Raises:
        ConfigError: the engine or a switch of the plan cannot run on tensors without data.
        ModelError: a hook or a switch needs values.
    """
    _check_support(plan, where)
    eager = (name for name in plan.switches if Resource.GRAPH not in REGISTRY[name].claims)
    plan = replace(plan, switches=tuple(eager))
    try:
        result = engine_memory(template, plan, source)
    except RapidformerError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or "it gives no reason"
        raise ModelError(
            f"the engine cannot train on tensors without data: {type(error).__name__}: {reason}",
            where=where,
            hint="the planner runs a step on tensors that have shapes but no values: the optimizer may read none",
        ) from error
    rest = result.peak - result.parameters - result.gradients - result.optimizer
    return Memory(result.parameters, result.gradients, result.optimizer, buffers=0, activations=rest)


def _check_support(plan: Plan, where: str) -> None:
    if plan.engine.endswith(":DeepSpeedEngine"):
        subject = "DeepSpeed's engine"
        hint = "--use-distributed-optimizer and --fsdp-memory-optimization have own engines"
    elif OFFLOADED in plan.switches:
        subject, hint = OFFLOADED, "plan without it: the result is an upper bound of the memory of the device"
    else:
        return
    raise ConfigError(f"{subject} needs values, so it cannot run on tensors without data", where=where, hint=hint)


def engine_memory(template: Template, plan: Plan, source: PlannedModel, blocks: int | None = None) -> EngineMemory:
    """Return the memory of the worker that needs most: of the first replica, in each stage of a pipeline.

    Args:
        template: has the hook for the optimizer, and counts targets.
        source: builds the model, the batches and the loss.
        blocks: number of blocks in each stack of the model. None for all of them.

    Raises:
        ModelError: a hook or a switch needs values.
    """
    sizes = plan.sizes
    ranks = range(0, sizes.world, sizes.world // sizes.pipeline)
    tasks = [partial(memory_of_rank, template, plan, source, rank, blocks) for rank in ranks]
    memories = in_forks(tasks)
    if len(memories) < len(tasks):  # there is one, or the error of a fork must be raised here
        memories = [task() for task in tasks]
    return max(memories, key=lambda memory: memory.peak)


def memory_of_rank(
    template: Template, plan: Plan, source: PlannedModel, rank: int, blocks: int | None = None
) -> EngineMemory:
    """Return the memory of one worker. See :func:`engine_memory`."""
    plan = replace(plan, builds_in_shares=False)  # how the model is built does not change the engine
    hooks = _with_source(template, plan, source, blocks)
    sample = source.batch(1)
    is_padded = isinstance(sample, dict) and "attention_mask" in sample
    counting = counted_engine(dense=not is_padded, on_cpu=plan.device == "cpu")
    with lone_worker(plan.sizes, rank) as workers, counting as live:
        run = Run(plan, template.config, hooks, (), workers, has_values=False)
        hooks.run_begins(run)
        run.data = Data(train=range(1), collate=lambda samples: source.batch(len(samples)))
        build_engine(run)
        gradients: list[int] = []
        run.engine.before_update.append(
            lambda: gradients.append(bytes_by_kind(run.engine.local_tensors())["gradients"])
        )
        batch = source.batch(plan.sizes.micro_batch)
        kernels = nullcontext() if plan.device == "cpu" else gpu_kernels()
        with known_links(run.engine, lambda model: source.compute_loss(model, batch)), kernels:
            for count in _accumulation_of_steps(plan):
                live.reset_peak()
                microbatches = list(_microbatches(run, batch, count))
                run.engine.step(microbatches, float(count)).run(1.0)
        states = bytes_by_kind(run.engine.local_tensors())
    return EngineMemory(rank, live.peak, states["parameters"], gradients[-1], states["optimizer"])


def _accumulation_of_steps(plan: Plan) -> Sequence[int]:
    """Return the number of micro batches of each step. The first step only creates the state of the optimizer."""
    sizes = plan.sizes
    if sizes.pipeline == 1:
        return 1, min(sizes.accumulation, ENOUGH_MICRO_BATCHES)
    whole_rounds = sizes.accumulation % sizes.pipeline == 0
    first = sizes.pipeline if whole_rounds else sizes.accumulation
    return first, min(sizes.accumulation, ENOUGH_ROUNDS * sizes.pipeline) if whole_rounds else sizes.accumulation


def _microbatches(run: Run, batch: Batch, count: int) -> Iterator[MicroBatch]:
    for _ in range(count):
        microbatch = MicroBatch(batch, list(range(run.plan.sizes.micro_batch)))
        microbatch.targets = 1.0
        yield microbatch


def _with_source(template: Template, plan: Plan, source: PlannedModel, blocks: int | None) -> Template:
    """Return a copy of a template with the model and the loss of the source."""
    kind: Any = type(template)

    class Planned(kind):
        def build_model(self) -> nn.Module:
            model = source.build(blocks)
            if plan.device != "cpu":
                for block in map(model.get_submodule, find_blocks(model)):
                    block.forward = with_gpu_kernels(block.forward)
            return model

        def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            return source.compute_loss(model, batch)

    planned: Template = Planned.__new__(Planned)
    vars(planned).update(vars(template), plan=plan)
    return planned
