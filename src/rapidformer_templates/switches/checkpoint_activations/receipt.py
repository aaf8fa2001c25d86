"""Receipt of what one micro batch keeps for its backward, with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.receipt import Probe, Receipt
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.checkpoint_activations.transform import PRODUCTS, Checkpointed, checkpointed_forward


class SavedTensors(Receipt):
    """Reports ``saved_tensor_bytes`` and ``saved_tensor_bytes_without``."""

    def before_step(self, probe: Probe) -> dict[str, int]:
        assembly = probe.engine.assembly
        with _saved_products(assembly) as products:
            with_it = _saved_by_forward(probe, products)
        checkpointed = list(_checkpointed(assembly))
        for forward in checkpointed:
            forward.enabled = False
        try:
            # Not compiled: compiling a graph only to measure it costs more than the measurement is worth.
            with torch.compiler.set_stance("force_eager"):
                without = _saved_by_forward(probe, {})
        finally:
            for forward in checkpointed:
                forward.enabled = True
        return {"saved_tensor_bytes": with_it, "saved_tensor_bytes_without": without}


def _checkpointed(assembly: Assembly) -> Iterator[Checkpointed]:
    """Yield the checkpointed forwards of the blocks."""
    forwards = (checkpointed_forward(block) for block in assembly.blocks.values())
    return (forward for forward in forwards if forward is not None)


WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes per element."""

Storages = dict[int, tuple[StorageWeakRef, int]]
"""Bytes of storages by id. The weak reference reserves the id without keeping the data."""


def _record_storage(tensor: torch.Tensor, storages: Storages) -> None:
    storage = local_part(tensor).untyped_storage()
    reference = StorageWeakRef(storage)
    storages[reference.cdata] = (reference, storage.nbytes())


class _Products(TorchDispatchMode):
    """Records the products that selective recomputation saves.

    torch stores them separately from autograd's saved tensors.

    Attributes:
        products: each product with its checksum.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []

    @staticmethod
    def _checksum(product: torch.Tensor) -> torch.Tensor:
        """Return the sum of the bits, read as integers. A copy would double the memory."""
        local = local_part(product)
        return local.view(WHOLE_NUMBERS[local.element_size()]).sum(dtype=torch.int64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            _record_storage(result, self._storages)
            self.products.append((result.detach(), self._checksum(result.detach())))
        return result

    def check(self, block: str) -> None:
        """Check that saved products have not changed.

        torch detects in-place writes by its own operations, but not those by collectives or foreign kernels.

        Raises:
            ModelError: a product saved for the backward is not what was computed.
        """
        for product, before in self.products:
            if not torch.equal(self._checksum(product), before):
                raise ModelError(
                    f"a product that is kept for the backward is overwritten in {block}",
                    where="--recompute-granularity selective",
                    hint="compute that out of place, or use --recompute-granularity full",
                )


def _recording(forward: Callable[..., Any], storages: Storages) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        with _Products(storages) as products:
            result = forward(*args, **kwargs)
        products.check(getattr(forward, "__qualname__", type(forward).__name__))
        return result

    return recording


@contextmanager
def _saved_products(assembly: Assembly) -> Iterator[Storages]:
    """Yield the products that blocks save in a forward. Autograd saves those of compiled blocks."""
    storages: Storages = {}
    plain = {f: f.forward for f in _checkpointed(assembly) if f.keeps and not assembly.is_compiled}
    for checkpointed, forward in plain.items():
        checkpointed.forward = _recording(forward, storages)
    try:
        yield storages
    finally:
        for checkpointed, forward in plain.items():
            checkpointed.forward = forward


def _saved_by_forward(probe: Probe, storages: Storages) -> int:
    """Bytes that a forward leaves for its backward, including those that it has added to ``products``."""
    # References keep the ids reserved: ZeRO-3 frees empty weights in the forward, and their ids with them.
    weights: Storages = {}
    for parameter in probe.engine.model.parameters():
        _record_storage(parameter, weights)

    def pack(tensor: torch.Tensor) -> None:
        """Count a tensor without keeping it. This graph never runs a backward, so its memory is not needed."""
        _record_storage(tensor, storages)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        probe.forward()
    return sum(size for identity, (_, size) in storages.items() if identity not in weights)
