"""A model divided by tensor and context parallelism: the real transforms on fake tensors in a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.optimizer_states import ParameterShape, part_of
from rapidformer_templates.planning.plan import ContextKind, EngineOptions, Plan, Sizes
from rapidformer_templates.switches.layout.context import divide_context
from rapidformer_templates.switches.layout.pipeline import PipelineCut
from rapidformer_templates.switches.layout.tensor import divide_matrices
from rapidformer_templates.switches.layout.tensor_plan import check_sizes, tensor_plan_of
from rapidformer_templates.system.workers import Workers


@contextmanager
def silent_group(tensor: int, context: int = 1) -> Iterator[Workers]:
    """Yield the first of ``tensor × context`` workers of a replica. The other workers do not exist.

    Collectives return at once, with tensors of the right shapes. Enter this context before fake tensors: the mesh
    of workers needs real ones.
    """
    world = tensor * context
    if world == 1:
        yield Workers(0, 0, 1, torch.device("cpu"))
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (1, context, tensor), mesh_dim_names=("pipeline", "copies", "tensor"))
        yield Workers(0, 0, world, torch.device("cpu"), tensor, 1, mesh, context)
    finally:
        dist.destroy_process_group()


def divide(assembly: Assembly, workers: Workers, *, sequence_parallel: bool) -> None:
    """Reduce a model to the first worker's share.

    Raises:
        ModelError: the model has no tensor plan, or its sizes cannot be divided.
    """
    if workers.tensor == 1:
        return
    switches = ("tensor-parallel", "sequence-parallel") if sequence_parallel else ("tensor-parallel",)
    plan = Plan("Trainer", switches=switches, sizes=Sizes(world=workers.world, tensor=workers.tensor))
    divide_matrices(assembly, Building(None, plan, workers, no_loss))


def divide_sequences(assembly: Assembly, workers: Workers, kind: ContextKind | None) -> None:
    """Make the model compute the first worker's shard of each sequence.

    Raises:
        ModelError: the model cannot be divided.
    """
    if workers.context == 1:
        return
    sizes = Sizes(world=workers.world, tensor=workers.tensor, context=workers.context)
    plan = Plan("Trainer", ("context-parallel",), sizes, engine_options=EngineOptions(context_kind=kind))
    divide_context(assembly, Building(None, plan, workers, no_loss, has_values=False))


def no_loss(model: nn.Module) -> Any:
    """Placeholder for transforms that do not try the user's loss."""
    raise AssertionError("this transform asks for no loss")


def local_parameters(
    model: nn.Module, parameters: Mapping[str, ParameterShape], tensor: int, rank: int
) -> dict[str, ParameterShape]:
    """Return the shares of worker ``rank`` of ``tensor`` workers. The first worker has the largest shares.

    Raises:
        ModelError: see :func:`divide`.
    """
    if tensor == 1:
        return dict(parameters)
    plan = tensor_plan_of(model)
    check_sizes(model, plan, tensor)
    divisions = {canonical_name(name): balanced_cut for name, balanced_cut in plan.divisions.items()}
    local = {}
    for name, facts in parameters.items():
        shape = list(facts.shape)
        if name in divisions:
            shape[divisions[name].dim] = part_of(shape[divisions[name].dim], rank, tensor)
        local[name] = replace(facts, shape=tuple(shape))
    return local


def ends_of(model: nn.Module, try_loss: Callable[[nn.Module], Any]) -> dict[str, frozenset[str]]:
    """Return the stages (``first``, ``middle``, ``last``) of each parameter outside the blocks. Each name is a key.

    Args:
        model: a model with three blocks, of fake tensors.
        try_loss: computes the loss of one sample.

    Raises:
        ModelError: the model cannot be cut between its blocks.
    """
    stages = ("first", "middle", "last")
    cut = PipelineCut(Assembly(model), len(stages), try_loss)
    return {
        canonical_name(name): frozenset(stages[rank] for rank in cut._ranks_of(name, {}))
        for name, _ in model.named_parameters(remove_duplicate=False)
        if cut._block_of(name) is None
    }
