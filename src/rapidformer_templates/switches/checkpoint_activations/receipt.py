"""What is kept for the backward of one micro batch, with recomputation and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.engines.receipt import Probe, Receipt
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.checkpoint_activations.transform import PRODUCTS, Checkpointed, checkpointed_forward


class SavedTensors(Receipt):
    """``saved_tensor_bytes`` and ``saved_tensor_bytes_without``."""

    def before_step(self, probe: Probe) -> dict[str, int]:
        model = probe.engine.model
        with _kept_products(model) as products:
            with_it = _kept_by_forward(probe, products)
        checkpointed = list(_checkpointed(model))
        for forward in checkpointed:
            forward.enabled = False
        try:
            # Not compiled: a graph for the sake of a measurement would cost more than it tells.
            with torch.compiler.set_stance("force_eager"):
                without = _kept_by_forward(probe, {})
        finally:
            for forward in checkpointed:
                forward.enabled = True
        return {"saved_tensor_bytes": with_it, "saved_tensor_bytes_without": without}


def _checkpointed(model: nn.Module) -> Iterator[Checkpointed]:
    """Those of the blocks."""
    found = (checkpointed_forward(block) for block in find_blocks(model).values())
    return (forward for forward in found if forward is not None)


WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""

Storages = dict[int, tuple[StorageWeakRef, int]]
"""Bytes of storages, each with what holds its identity, which is not given to another then, but no data."""


def _note(tensor: torch.Tensor, storages: Storages) -> None:
    storage = local_part(tensor).untyped_storage()
    reference = StorageWeakRef(storage)
    storages[reference.cdata] = (reference, storage.nbytes())


class _Products(TorchDispatchMode):
    """Notes what a selective recomputation keeps: torch holds it apart from what autograd saves.

    Attributes:
        kept: each product with the checksum that it had.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @staticmethod
    def _checksum(product: torch.Tensor) -> torch.Tensor:
        """The sum of the bits, read as whole numbers: a copy would take as much memory again."""
        local = local_part(product)
        return local.view(WHOLE_NUMBERS[local.element_size()]).sum(dtype=torch.int64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            _note(result, self._storages)
            self.kept.append((result.detach(), self._checksum(result.detach())))
        return result

    def check(self, block: str) -> None:
        """torch sees what its own operations write in place, and not what collectives or foreign kernels do.

        Raises:
            ModelError: what is kept for the backward is not what was computed.
        """
        for product, before in self.kept:
            if not torch.equal(self._checksum(product), before):
                raise ModelError(
                    f"a product that is kept for the backward is written over in {block}",
                    where="--recompute-granularity selective",
                    hint="compute that out of place, or use --recompute-granularity full",
                )


def _noting(forward: Callable[..., Any], storages: Storages) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        with _Products(storages) as products:
            result = forward(*args, **kwargs)
        products.check(getattr(forward, "__qualname__", type(forward).__name__))
        return result

    return noting


@contextmanager
def _kept_products(model: nn.Module) -> Iterator[Storages]:
    """The products that blocks keep in a forward. Those of a compiled block are among what autograd saves."""
    storages: Storages = {}
    compiled = "compile_records" in vars(model)
    plain = {f: f.forward for f in _checkpointed(model) if f.keeps and not compiled}
    for checkpointed, forward in plain.items():
        checkpointed.forward = _noting(forward, storages)
    try:
        yield storages
    finally:
        for checkpointed, forward in plain.items():
            checkpointed.forward = forward


def _kept_by_forward(probe: Probe, kept: Storages) -> int:
    """Bytes that a forward leaves for its backward, those that it has put into ``kept`` by itself among them."""
    weights: Storages = {}  # held, too: ZeRO-3 gives up the empty ones in the forward, and their identities with them
    for parameter in probe.engine.model.parameters():
        _note(parameter, weights)

    def pack(tensor: torch.Tensor) -> None:
        """Count and let go: nothing is ever computed from this graph, so its memory is not needed."""
        _note(tensor, kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        probe.forward()
    return sum(size for identity, (_, size) in kept.items() if identity not in weights)
