"""What is kept for the backward of one micro batch, with checkpointing and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.engines.receipt import Probe, Receipt
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.checkpoint_activations.transform import Checkpointed


class SavedTensors(Receipt):
    """``saved_tensor_bytes`` and ``saved_tensor_bytes_without``."""

    def before_step(self, probe: Probe) -> dict[str, int]:
        checkpointed = list(_checkpointed(probe.engine.model))
        with_it = _kept_by_forward(probe)
        for forward in checkpointed:
            forward.enabled = False
        try:
            # Not compiled: a graph for the sake of a measurement would cost more than it tells.
            with torch.compiler.set_stance("force_eager"):
                without = _kept_by_forward(probe)
        finally:
            for forward in checkpointed:
                forward.enabled = True
        return {"saved_tensor_bytes": with_it, "saved_tensor_bytes_without": without}


def _checkpointed(model: nn.Module) -> Iterator[Checkpointed]:
    """Those of the blocks, also inside of what another switch has put around them."""
    for block in find_blocks(model).values():
        forward: Any = block.forward
        while not isinstance(forward, Checkpointed) and hasattr(forward, "forward"):
            forward = forward.forward
        if isinstance(forward, Checkpointed):
            yield forward


def _kept_by_forward(probe: Probe) -> int:
    weights = {StorageWeakRef(local_part(p).untyped_storage()).cdata for p in probe.engine.model.parameters()}
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor: torch.Tensor) -> None:
        """Count and let go: nothing is ever computed from this graph, so its memory is not needed."""
        storage = local_part(tensor).untyped_storage()
        reference = StorageWeakRef(storage)  # holds the identity, which is not given to another, but no data
        if reference.cdata not in weights:
            kept[reference.cdata] = (reference, storage.nbytes())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        probe.forward()
    return sum(size for _, size in kept.values())
