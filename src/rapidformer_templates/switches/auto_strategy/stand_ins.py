"""Stand-ins for a trace: tensors without data, and workers that do not exist but divide a model with this one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.optimizer_states import ParameterShape, part_of
from rapidformer_templates.planning.plan import ContextKind, EngineOptions, Plan, Sizes
from rapidformer_templates.switches.layout.context import divide_context
from rapidformer_templates.switches.layout.pipeline import PipelineCut
from rapidformer_templates.switches.layout.tensor import divide_matrices
from rapidformer_templates.switches.layout.tensor_plan import check_sizes, tensor_plan_of
from rapidformer_templates.system.replaced_functions import patch_function
from rapidformer_templates.system.workers import Workers

_as_if_real: ContextVar[bool] = ContextVar("fake tensors taken for real ones", default=False)


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Enable tensors without data. transformers takes the same path through a model as with data."""
    patch_function(import_utils, "is_fake_tensor", lambda check, tensor: not _as_if_real.get() and check(tensor))
    token = _as_if_real.set(True)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        _as_if_real.reset(token)


_NUMBER = torch.ops.aten._local_scalar_dense.default
_POSITIONS = torch.ops.aten.nonzero.default
_COUNTS = torch.ops.aten.bincount.default
_DISTINCT = torch.ops.aten._unique2.default
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
DATA_DEPENDENT_OPS = frozenset({_NUMBER, _POSITIONS, _COUNTS, _DISTINCT, GROUPED_PRODUCT})
"""Operations whose result or shape depends on data, and grouped products, which torch fakes only in 16 bits."""


def answer(
    question: OpOverload, args: Sequence[Any], *, dense: bool
) -> torch.Tensor | tuple[torch.Tensor, ...] | bool | int:
    """Return a fake answer. A mask hides nothing or something, documents are not packed, and all rows count and differ.

    Args:
        question: one of ``DATA_DEPENDENT_OPS``.
        args: arguments of the operation. The first is the tensor.
        dense: whether a mask hides nothing.
    """
    tensor: torch.Tensor = args[0]
    if question is _POSITIONS:
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
    if question is _COUNTS:
        return tensor.new_empty((args[2],), dtype=torch.int64)  # the highest possible number
    if question is _DISTINCT:  # the values, and the place of each element among them
        return tensor.new_empty((tensor.numel(),)), torch.empty_like(tensor), tensor.new_empty((0,))
    if question is GROUPED_PRODUCT:  # the product of each group's rows with its matrix
        left, right, ends = args[:3]
        groups = [len(ends)] if left.ndim == right.ndim == 2 else []  # two flat operands have a product per group
        return tensor.new_empty((*groups, left.shape[-2], right.shape[-1]))
    return dense if tensor.dtype == torch.bool else 1


class FakeDataReads(TorchDispatchMode):
    """Answers a model's questions about data in code that is not traced."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self._dense = dense

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        return answer(func, args, dense=self._dense) if func in DATA_DEPENDENT_OPS else func(*args, **(kwargs or {}))


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Open a process group without peers. Collectives return at once, with tensors of the right shapes."""
    hook = sys.excepthook  # torch replaces it, and later errors would name a rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def silent_group(tensor: int, context: int = 1) -> Iterator[Workers]:
    """Yield the first of ``tensor × context`` workers of a replica. The other workers do not exist.

    Enter this context before fake tensors: the mesh of workers needs real ones.
    """
    world = tensor * context
    if world == 1:
        yield Workers(0, 0, 1, torch.device("cpu"))
        return
    with fake_group(0, world):
        mesh = init_device_mesh("cpu", (1, context, tensor), mesh_dim_names=("pipeline", "copies", "tensor"))
        yield Workers(0, 0, world, torch.device("cpu"), tensor, 1, mesh, context)


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


def no_loss(model: nn.Module) -> NoReturn:
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


def ends_of(model: nn.Module, try_loss: Callable[[nn.Module], torch.Tensor]) -> dict[str, frozenset[str]]:
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
