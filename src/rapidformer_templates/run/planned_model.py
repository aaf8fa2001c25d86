"""Runs the hooks of a script, and the engine of a plan, on tensors without data for the planner."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from rapidformer_templates.data.loader import MicroBatch, load
from rapidformer_templates.data.order import BatchRequest, Stream
from rapidformer_templates.data.types import Batch, Data, Endless
from rapidformer_templates.engines.contract import bytes_by_kind
from rapidformer_templates.engines.loss import loss_and_count
from rapidformer_templates.errors import ConfigError, ModelError, RapidformerError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.switch import Resource
from rapidformer_templates.run.building import build_data, build_engine, turn_off_cache
from rapidformer_templates.run.configure import PLAN_ONE_LAYOUT, own_hooks_of_model
from rapidformer_templates.run.hooks import checked_model
from rapidformer_templates.run.run import Run, Template
from rapidformer_templates.switches.auto_strategy.fake_world import counted_engine, known_links, lone_worker
from rapidformer_templates.switches.auto_strategy.results import Memory
from rapidformer_templates.switches.auto_strategy.trace import ENOUGH_ROUNDS
from rapidformer_templates.switches.auto_strategy.tracing import gpu_kernels, in_forks, with_gpu_kernels
from rapidformer_templates.system.workers import Workers


class DefaultModel(Protocol):
    """Builds the model that the flags describe."""

    def build(self, blocks: int | None) -> nn.Module:
        """Build the model with ``blocks`` blocks in each stack, or with all of them."""


class HookModel:
    """Builds what a template's ``build_model``, ``build_data`` and ``compute_loss`` make.

    The data are built once, because the shapes of a batch follow from its samples. The model is built several times.

    Attributes:
        tokens: tokens per sample. 1 if a batch has no ``input_ids``.
    """

    def __init__(self, template: Template, default: Callable[[RunConfig], DefaultModel]) -> None:
        """``default`` describes the model if the template has no ``build_model``. That hook may load weights."""
        self._run = Run(Plan("Trainer"), template.config, template, (), Workers(0, 0, 1, torch.device("cpu")))
        template.run_begins(self._run)
        self._default = None if self._run.overrides("build_model") else default(template.config)
        self._samples = build_data(self._run)
        self._batches: dict[int, Batch] = {}
        self.tokens = max(self._load(1).padded_tokens, 1)

    def build(self, blocks: int | None) -> nn.Module:
        """Build the model with ``blocks`` blocks in each stack, or with all of them.

        Raises:
            ModelError: the hook fails on tensors without data, or the blocks are not in a list.
        """
        if self._default:
            return self._default.build(blocks)
        with _explained("build_model()", PLANNED_HOOK):
            model = checked_model(self._run.hooks.build_model())
        turn_off_cache(model)
        if blocks is None:
            return model
        # Remove blocks from the middle of each stack, until ``blocks`` are left.
        stacks = dict.fromkeys(name.rpartition(".")[0] for name in find_blocks(model))
        for stack in map(model.get_submodule, stacks):
            if not isinstance(stack, (nn.ModuleList, nn.Sequential)):
                message = f"the planner cannot leave out blocks of a {type(stack).__name__}"
                raise ModelError(message, where="build_model()", hint="keep the blocks in a torch.nn.ModuleList")
            if len(stack) > blocks:
                del stack[blocks - 1 : -1]
        return model

    def batch(self, samples: int) -> Batch:
        """Return a micro batch with the shapes of the first samples."""
        if samples not in self._batches:
            with unset_fake_temporarily():
                self._batches[samples] = self._load(samples).batch
        return _without_data(self._batches[samples])

    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of the hook.

        Raises:
            ModelError: the hook fails on tensors without data.
        """
        with _explained("compute_loss(model, batch)", PLANNED_HOOK):
            loss: torch.Tensor = loss_and_count(self._run.hooks.compute_loss(model, batch))[0]
        return loss

    def _load(self, samples: int) -> MicroBatch:
        indices = list(range(samples))
        if not isinstance(self._samples, Endless):
            indices = [index % len(self._samples) for index in indices]
        key = (self._run.config.training.seed, Stream.TRIAL)
        request = BatchRequest(indices, key, list(range(samples)))
        (microbatch,) = load(self._samples, self._run.data, [request], workers=0, pin_memory=False)
        return microbatch


def hook_model(
    template: Template, default: Callable[[RunConfig], DefaultModel], *, searching: bool = False
) -> HookModel | None:
    """Return the source of a model that a script's own hooks make, or None if its flags describe model and batches.

    Args:
        default: see :class:`HookModel`.
        searching: whether layouts are compared, which needs the state of each optimizer in every layout.

    Raises:
        ConfigError: layouts are compared, and the script has its own optimizer.
    """
    own = own_hooks_of_model(type(template))
    if searching and "build_optimizer" in own:
        message = f"a search cannot see what {type(template).__name__}.build_optimizer makes"
        raise ConfigError(message, where="build_optimizer()", hint=PLAN_ONE_LAYOUT)
    return HookModel(template, default) if own else None


PLANNED_HOOK = "the planner calls it with tensors that have shapes but no values: read neither values nor weights"
"""What to do if a hook fails."""


@contextmanager
def _explained(where: str, hint: str, failed: str = "{} cannot be planned") -> Iterator[None]:
    """Convert an exception to a :class:`ModelError`.

    Args:
        where: the hook or the flag.
        failed: what has failed, with a place for it.
    """
    try:
        yield
    except RapidformerError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or "it gives no reason"
        message = f"{failed.format(where)}: {type(error).__name__}: {reason}"
        raise ModelError(message, where=where, hint=hint) from error


def _without_data(batch: Batch) -> Batch:
    """Return a batch with new tensors of the same shapes and types."""
    if isinstance(batch, UserDict):  # transformers' BatchEncoding
        other = copy.copy(batch)
        other.data = _without_data(batch.data)
        return other
    return tree_map_only(torch.Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), batch)


ENOUGH_MICRO_BATCHES = 3
"""Micro batches without a pipeline: the first, one that is repeated, and the last."""

OFFLOADED = "offload-activations"


class PlannedModel(DefaultModel, Protocol):
    """Builds the model of a plan, its batches and its loss. ``ModelSource`` of the planner documents each member."""

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
    subject = hint = ""
    if plan.engine.endswith(":DeepSpeedEngine"):
        subject = "DeepSpeed's engine"
        hint = "--use-distributed-optimizer and --fsdp-memory-optimization have own engines"
    elif OFFLOADED in plan.switches:
        subject, hint = OFFLOADED, "plan without it: the result is an upper bound of the memory of the device"
    if subject:
        raise ConfigError(f"{subject} needs values, so it cannot run on tensors without data", where=where, hint=hint)
    eager = (name for name in plan.switches if Resource.GRAPH not in REGISTRY[name].claims)
    plan = replace(plan, switches=tuple(eager))
    hint = "the planner runs a step on tensors that have shapes but no values: the optimizer may read none"
    with _explained(where, hint, "the engine cannot train on tensors without data"):
        result = engine_memory(template, plan, source)
    rest = result.peak - result.parameters - result.gradients - result.optimizer
    return Memory(result.parameters, result.gradients, result.optimizer, buffers=0, activations=rest)


def engine_memory(template: Template, plan: Plan, source: PlannedModel) -> EngineMemory:
    """Return the memory of the worker that needs most: of the first replica, in each stage of a pipeline.

    Args:
        template: has the hook for the optimizer, and counts targets.
        source: builds the model, the batches and the loss.

    Raises:
        ModelError: a hook or a switch needs values.
    """
    sizes = plan.sizes
    ranks = range(0, sizes.world, sizes.world // sizes.pipeline)
    tasks = [partial(memory_of_rank, template, plan, source, rank) for rank in ranks]
    memories = in_forks(tasks)
    if len(memories) < len(tasks):  # there is one, or the error of a fork must be raised here
        memories = [task() for task in tasks]
    return max(memories, key=lambda memory: memory.peak)


def memory_of_rank(template: Template, plan: Plan, source: PlannedModel, rank: int) -> EngineMemory:
    """Return the memory of one worker. See :func:`engine_memory`."""
    plan = replace(plan, builds_in_shares=False)  # how the model is built does not change the engine
    hooks = _with_source(template, plan, source)
    sample = source.batch(1)
    is_padded = isinstance(sample, dict) and "attention_mask" in sample
    counting = counted_engine(dense=not is_padded, on_cpu=plan.device == "cpu")
    with lone_worker(plan.sizes, rank) as workers, counting as live:
        run = Run(plan, template.config, hooks, (), workers, has_values=False)
        hooks.run_begins(run)
        run.data = Data(train=range(1), collate=lambda samples: source.batch(len(samples)))
        build_engine(run)
        engine, gradients = run.engine, list[int]()
        engine.before_update.append(lambda: gradients.append(bytes_by_kind(engine.local_tensors())["gradients"]))
        batch = source.batch(plan.sizes.micro_batch)
        kernels = nullcontext() if plan.device == "cpu" else gpu_kernels()
        with known_links(run.engine, lambda model: source.compute_loss(model, batch)), kernels:
            for count in _accumulation_of_steps(plan):
                live.reset_peak()
                rows = list(range(plan.sizes.micro_batch))
                microbatches = [MicroBatch(batch, rows, targets=1.0) for _ in range(count)]
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


def _with_source(template: Template, plan: Plan, source: PlannedModel) -> Template:
    """Return a copy of a template with the model and the loss of the source."""
    kind: Any = type(template)

    class Planned(kind):
        def build_model(self) -> nn.Module:
            model = source.build(None)
            if plan.device != "cpu":
                for block in map(model.get_submodule, find_blocks(model)):
                    block.forward = with_gpu_kernels(block.forward)
            return model

        def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            return source.compute_loss(model, batch)

    planned: Template = Planned.__new__(Planned)
    vars(planned).update(vars(template), plan=plan)
    return planned
