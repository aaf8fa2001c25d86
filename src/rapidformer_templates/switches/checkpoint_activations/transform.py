"""Transform that recomputes activations in the backward, and the receipt of what a micro batch keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Probe, Receipt, sum_of_bits
from rapidformer_templates.engines.forwards import PRODUCTS, Checkpointed, checkpointed_forward
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import norms_with_statistics
from rapidformer_templates.switches.checkpoint_activations.declaration import CheckpointActivationsFlags

FLAG = "--checkpoint-activations"


def checkpoint_activations(assembly: Assembly, building: Building[CheckpointActivationsFlags]) -> None:
    """Keep only the inputs of each block, selectively also its products, and recompute the rest in the backward.

    The block's ``forward`` is replaced on the instance: its parameters keep their names, and hooks
    of a sharding engine are outside of the recomputation. See Chen et al., 2016, and for the selective
    mode Korthikanti et al., 2022 ("Reducing Activation Recomputation in Large Transformer Models").

    Raises:
        ModelError: the model has no repeated blocks.
    """
    blocks, options = assembly.require_blocks("activation checkpointing", FLAG), building.options
    selective = options.recompute_granularity == "selective"
    for block in islice(blocks.values(), options.recompute_num_layers):
        norms = norms_with_statistics(block)
        block.forward = Checkpointed(block.forward, selective=selective, norms=norms, flag=FLAG)


class SavedTensors(Receipt):
    """Reports ``saved_tensor_bytes`` and ``saved_tensor_bytes_without``."""

    def before_step(self, probe: Probe) -> dict[str, int]:
        assembly = probe.engine.assembly
        forwards = (checkpointed_forward(block) for block in assembly.blocks.values())
        checkpointed = [forward for forward in forwards if forward is not None]
        # Autograd saves the products of compiled blocks.
        selective = [] if assembly.is_compiled else [forward for forward in checkpointed if forward.keeps]
        with _saved_products(selective) as products:
            with_it = _saved_by_forward(probe, products)
        # Not compiled: compiling a graph only to measure it costs more than the measurement is worth.
        with ExitStack() as plain, torch.compiler.set_stance("force_eager"):
            for forward in checkpointed:
                plain.enter_context(patch.object(forward, "enabled", False))
            without = _saved_by_forward(probe, {})
        return {"saved_tensor_bytes": with_it, "saved_tensor_bytes_without": without}


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

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            _record_storage(result, self._storages)
            self.products.append((result.detach(), sum_of_bits(result)))
        return result

    def check(self, block: str) -> None:
        """Check that saved products have not changed.

        torch detects in-place writes by its own operations, but not those by collectives or foreign kernels.

        Raises:
            ModelError: a product saved for the backward is not what was computed.
        """
        for product, before in self.products:
            if not torch.equal(sum_of_bits(product), before):
                message = f"a product that is kept for the backward is overwritten in {block}"
                hint = "compute that out of place, or use --recompute-granularity full"
                raise ModelError(message, where="--recompute-granularity selective", hint=hint)


@contextmanager
def _saved_products(checkpointed: Sequence[Checkpointed]) -> Iterator[Storages]:
    """Yield the products that the blocks with these forwards save."""
    storages: Storages = {}

    def recording(forward: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object, **kwargs: object) -> object:
            with _Products(storages) as products:
                result = forward(*args, **kwargs)
            products.check(getattr(forward, "__qualname__", type(forward).__name__))
            return result

        return record

    with ExitStack() as replaced:
        for one in checkpointed:
            replaced.enter_context(patch.object(one, "forward", recording(one.forward)))
        yield storages


def _saved_by_forward(probe: Probe, storages: Storages) -> int:
    """Return the bytes that a forward leaves for its backward, including those in ``storages``."""
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
