"""Transform that recomputes activations in the backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import Cache

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError

PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten.convolution.default,
    }
)
"""Products with weights. Attention's products of two activations are batched ones or a fused kernel."""


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers with running statistics, which must see each batch only once."""


def checkpoint_activations(assembly: Assembly, building: Building) -> None:
    """Keep only the inputs of each block, selectively also its products, and recompute the rest in the backward.

    The block's ``forward`` is replaced on the instance: its parameters keep their names, and hooks
    of a sharding engine are outside of the recomputation. See Chen et al., 2016, and for the selective
    mode Korthikanti et al., 2022 ("Reducing Activation Recomputation in Large Transformer Models").

    Raises:
        ModelError: the model has no repeated blocks.
    """
    blocks = assembly.blocks
    if not blocks:
        raise ModelError(
            "activation checkpointing found no repeated blocks",
            where=type(assembly.model).__name__,
            hint="keep the blocks in an nn.ModuleList, or leave --checkpoint-activations out",
        )
    options = building.options
    selective = options.recompute_granularity == "selective"
    for block in islice(blocks.values(), options.recompute_num_layers):
        norms = [module for module in block.modules() if isinstance(module, NORMS)]
        block.forward = Checkpointed(block.forward, selective=selective, norms=norms)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


_KEEP_PRODUCTS = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}


class Checkpointed:
    """A forward that computes its activations twice. Set ``enabled`` to False to measure without recomputation.

    Args:
        selective: whether to save products with weights and recompute everything else.
        norms: batch norms inside it, which must count a batch only once.
    """

    def __init__(self, forward: Any, *, selective: bool = False, norms: Sequence[nn.Module] = ()) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.norms = norms
        self.enabled = True
        self.keeps: dict[str, Any] = _KEEP_PRODUCTS if selective else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise ModelError(
                "a block gets a cache of keys and values, which a second forward would extend again",
                where="--checkpoint-activations",
                hint="set use_cache to False in the model's config, or leave the flag out",
            )
        forward = _CountsOnce(self.forward, self.norms) if self.norms else self.forward
        output = checkpoint(forward, *args, use_reentrant=False, **self.keeps, **kwargs)
        if not torch.compiler.is_compiling():
            torch.clear_autocast_cache()  # the backward casts the weights again, and nobody else keeps these copies
        return output


class _CountsOnce:
    """A forward whose recomputation does not update the statistics of batch norms, because it sees the same batch.

    Copies replace the statistics meanwhile. Copying them back would be an operation that the first forward lacks.
    """

    def __init__(self, forward: Any, norms: Sequence[nn.Module]) -> None:
        self.forward = forward
        self.copies = [
            (norm, name, buffer.clone()) for norm in norms for name, buffer in norm.named_buffers(recurse=False)
        ]
        self.is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            self.is_first = False
            return self.forward(*args, **kwargs)
        statistics = [(norm, name, getattr(norm, name)) for norm, name, _ in self.copies]
        try:
            for norm, name, copy in self.copies:
                setattr(norm, name, copy)
            return self.forward(*args, **kwargs)
        finally:
            for norm, name, buffer in statistics:
                setattr(norm, name, buffer)


def checkpointed_forward(block: nn.Module) -> Checkpointed | None:
    """Return the checkpointed forward of a block, also inside other switches' wrappers, or None."""
    forward: Any = block.forward
    while not isinstance(forward, Checkpointed) and hasattr(forward, "forward"):
        forward = forward.forward
    return forward if isinstance(forward, Checkpointed) else None
