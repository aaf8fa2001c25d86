"""What computes activations again."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rapidformer_templates.engines.model_building import Building
from rapidformer_templates.errors import ModelError


def checkpoint_activations(model: nn.Module, building: Building) -> nn.Module:
    """Keep only the inputs of each block and compute its activations again in the backward pass.

    The block's ``forward`` is replaced on the instance: its parameters keep their names, and hooks
    of a sharding engine stay outside of what is computed again. Chen et al., 2016.

    Raises:
        ModelError: the model has no repeated blocks.
    """
    blocks = building.blocks
    if not blocks:
        raise ModelError(
            "activation checkpointing found no repeated blocks",
            where=type(model).__name__,
            hint="keep the blocks in an nn.ModuleList, or leave --checkpoint-activations out",
        )
    for block in blocks.values():
        block.forward = Checkpointed(block.forward)
    return model


class Checkpointed:
    """A forward that computes its activations twice; ``enabled`` is for measuring without."""

    def __init__(self, forward: Any) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.enabled = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
