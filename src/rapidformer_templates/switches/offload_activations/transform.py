"""Transform that makes the blocks keep their activations in host memory, and the receipt of the bytes sent."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.engines.forwards import (
    PRODUCTS,
    Checkpointed,
    ContextFunction,
    SavesMatmuls,
    backward_may_follow,
)
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.offload_activations.offloader import Offloader, PinnedMemory, SavedTensor


def offload_activations(assembly: Assembly, building: Building[object]) -> None:
    """Keep the activations that blocks save for their backward in host memory. See ``offloader``.

    Raises:
        ModelError: the model has no repeated blocks.
    """
    blocks = list(assembly.blocks.values())
    if not blocks:
        raise ModelError(
            "activation offloading found no repeated blocks",
            where=type(assembly.model).__name__,
            hint="keep the blocks in an nn.ModuleList, or leave --offload-activations out",
        )
    offloader = Offloader(PinnedMemory(building.workers.device), building.workers.device)
    offload_blocks(blocks, offloader)
    assembly.record(offloader)


def offload_blocks(blocks: list[nn.Module], offloader: Offloader) -> None:
    """Replace each block's ``forward`` on the instance. Its parameters keep their names, and hooks stay outside."""
    for number, block in enumerate(blocks):
        if isinstance(block.forward, Checkpointed) and block.forward.keeps:
            block.forward.keeps = {"context_fn": offloaded_products(offloader)}
        block.forward = Offloaded(block, number, offloader)


class Offloaded:
    """A block's forward that leaves no large activations on the device for its backward.

    Attributes:
        forward: the original forward.
    """

    def __init__(self, block: nn.Module, number: int, offloader: Offloader) -> None:
        functools.update_wrapper(self, block.forward)
        self.forward: Callable[..., object] = block.forward
        self._block, self._number, self._offloader = block, number, offloader

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled() or not backward_may_follow():
            return self.forward(*args, **kwargs)
        with self._offloader.around(self._number, self._block, args, kwargs):
            return self.forward(*args, **kwargs)


def offloaded_products(offloader: Offloader) -> ContextFunction:
    """Return a ``context_fn`` for torch's checkpoint: modes for the forward and for its recomputation.

    They offload the matmul outputs that selective recomputation saves. torch holds them where autograd's hooks do not
    see them.
    """

    def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        products: deque[torch.Tensor | SavedTensor] = deque()
        return _SaveProducts(offloader, products), _ReturnProducts(offloader, products)

    return contexts


class _SaveProducts(TorchDispatchMode, SavesMatmuls):
    def __init__(self, offloader: Offloader, products: deque[torch.Tensor | SavedTensor]) -> None:
        super().__init__()
        self._offloader, self._products = offloader, products

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # Without a backward the offloader sends nothing to the host, and the products of all blocks would stay here.
        if func in PRODUCTS and backward_may_follow():
            self._products.append(self._offloader.pack(result.detach()))
        return result


class _ReturnProducts(_SaveProducts):
    """Returns the saved outputs in the order in which they were computed. The recomputation has the same order."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in PRODUCTS:
            return self._offloader.unpack(self._products.popleft())
        return func(*args, **(kwargs or {}))


class Offloading(Receipt):
    """Reports ``offloaded_bytes``, ``offloaded_bytes_at_a_time`` and ``late_bytes`` of this worker."""

    def __init__(self) -> None:
        self._first: dict[str, int] | None = None

    def after_step(self, engine: Engine) -> dict[str, int]:
        offloader = engine.assembly.find(Offloader)
        if offloader is not None and self._first is None:
            counts = offloader.counts
            self._first = {
                "offloaded_bytes": counts.sent,
                "offloaded_bytes_at_a_time": counts.most_offloaded,
                "late_bytes": counts.late,
            }
        return self._first or {}
