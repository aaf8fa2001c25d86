"""A worker whose peers do not exist: a real engine runs in it on tensors without data, and its memory is counted.

Collectives return at once, with tensors of the right shapes. Every worker has the values of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch
from warnings import catch_warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Reducer
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.models.blocks import hidden_of
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.switches.auto_strategy.stand_ins import FakeDataReads, fake_group, fake_tensors
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages, without_warnings
from rapidformer_templates.switches.layout.experts import TokenDispatcher
from rapidformer_templates.switches.layout.pipeline_engine import Links, RunsStages
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers

T = TypeVar("T")


@dataclass(frozen=True)
class LoneWorker(Workers):
    """A worker without peers. Each of them would have the same values."""

    def sum(self, *values: float) -> list[float]:
        # Other workers count what this one does not, such as the tokens of a replica.
        return [value * self.world or 1.0 for value in values]

    def agree(self, number: int) -> bool:
        return True

    def gather(self, value: T) -> list[T]:
        return [value] * self.world

    def broadcast(self, value: T) -> T:
        return value

    def barrier(self) -> None:
        pass

    def open_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        with _disable_current_modes():  # a mesh reads the ranks in its tensors
            return super().open_mesh(shape, names)


@contextmanager
def lone_worker(sizes: Sizes, rank: int) -> Iterator[Workers]:
    """Yield worker ``rank`` of the workers of a plan. Enter this context before fake tensors."""
    device, divided = torch.device("cpu"), (sizes.tensor, sizes.pipeline)
    workers = LoneWorker(rank, rank, sizes.world, device, *divided, context=sizes.context)
    with fake_group(rank, sizes.world) if sizes.world > 1 else nullcontext():
        if sizes.divides > 1:
            shape = (sizes.pipeline, sizes.copies, sizes.tensor)
            workers = replace(workers, mesh=workers.open_mesh(shape, ("pipeline", "copies", "tensor")))
        yield workers


REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

MESH_READS = ("__init__", "__getitem__", "_flatten", "get_group", "_get_all_submeshes", "get_local_rank")
"""Methods of torch's meshes that read values of tensors."""


@contextmanager
def counted_engine(*, dense: bool, on_cpu: bool) -> Iterator[LiveStorages]:
    """Build and run an engine on tensors without data inside the context, and count their storages.

    Args:
        dense: whether attention masks hide nothing.
        on_cpu: whether gloo exchanges the tensors.
    """
    live = LiveStorages()
    with ExitStack() as stack:
        for name in MESH_READS:
            stack.enter_context(patch.object(DeviceMesh, name, _disable_current_modes()(getattr(DeviceMesh, name))))
        stack.enter_context(_reducer_without_peers())
        stack.enter_context(patch.object(TokenDispatcher, "rows", _even_rows))
        if on_cpu:
            stack.enter_context(patch.object(dist, REDUCE_SCATTER, _reduce_a_copy(getattr(dist, REDUCE_SCATTER))))
        # Fake tensors are on the CPU already, and torch cannot replace a parameter by a fake one in place.
        stack.enter_context(patch.object(accelerator, "move", lambda model, device: model))
        stack.enter_context(patch.object(accelerator, "swaps_parameters", lambda device: False))
        stack.enter_context(without_warnings())
        stack.enter_context(fake_tensors())
        stack.enter_context(live.following_resizes())
        stack.enter_context(FakeDataReads(dense=dense))
        stack.enter_context(live)
        yield live


def _reduce_a_copy(reduce_scatter: Callable[..., T]) -> Callable[..., T]:
    """Allocate the copy of the sent tensor that gloo makes."""

    def reduce_a_copy(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> T:
        torch.empty_like(input)
        return reduce_scatter(output, input, *args, **kwargs)

    return reduce_a_copy


def _even_rows(dispatcher: TokenDispatcher, counts: torch.Tensor, tokens: int) -> list[int]:
    """Assume that the gate sends equally many tokens to each worker."""
    return [tokens // len(counts)] * len(counts)


@contextmanager
def _reducer_without_peers() -> Iterator[None]:
    """Let DDP's own reducer fill its buckets, but send nothing: its C++ code reads the memory that it sends."""
    build, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def unchanged(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations by identity
        exchanged: Future[torch.Tensor] = Future()
        exchanged.set_result(bucket.buffer())
        return exchanged

    def build_alone(ddp: DistributedDataParallel, module: nn.Module, **options: Any) -> None:
        with catch_warnings(action="ignore", category=FutureWarning):  # its replacement needs peers
            build(ddp, module, **(options | {"init_sync": False, "broadcast_buffers": False}))
        register(ddp, None, unchanged)

    with (
        patch.object(DistributedDataParallel, "__init__", build_alone),
        patch.object(DistributedDataParallel, "register_comm_hook", lambda *_: None),
        patch.object(Reducer, "_rebuild_buckets", lambda _: False),  # other buckets, with as many bytes
    ):
        yield


@contextmanager
def known_links(engine: Engine, compute_loss: Callable[[nn.Module], object]) -> Iterator[None]:
    """Let the stages of a pipeline receive hidden states of the form that their batch makes.

    Args:
        compute_loss: computes the loss of a micro batch.
    """
    if not isinstance(engine, RunsStages):
        yield
        return
    block = next(iter(engine.assembly.blocks.values()))
    forms: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def record(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hidden = hidden_of(args, kwargs)
        # Where the modules before the blocks are absent, their outputs have the type that they had before a cast.
        types = (hidden.dtype, max(block.parameters(), key=torch.Tensor.numel).dtype)
        forms.append((min(types, key=lambda dtype: dtype.itemsize), tuple(hidden.shape)))

    hook = block.register_forward_pre_hook(record, prepend=True, with_kwargs=True)
    with engine.measuring() as model, torch.no_grad():
        compute_loss(model)
    hook.remove()
    with patch.object(Links, "receive_form", lambda links, stage: forms[0]):
        yield
