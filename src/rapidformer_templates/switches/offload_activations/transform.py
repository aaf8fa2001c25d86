"""Transform that makes the blocks keep their activations in host memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.side_effects import backward_may_follow
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.checkpoint_activations.transform import Checkpointed
from rapidformer_templates.switches.offload_activations.host import PinnedMemory
from rapidformer_templates.switches.offload_activations.offloader import Offloader
from rapidformer_templates.switches.offload_activations.selective import offloaded_products


def offload_activations(assembly: Assembly, building: Building) -> None:
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
        self.forward: Any = block.forward
        self._block, self._number, self._offloader = block, number, offloader

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not backward_may_follow():
            return self.forward(*args, **kwargs)
        with self._offloader.around(self._number, self._block, args, kwargs):
            return self.forward(*args, **kwargs)
