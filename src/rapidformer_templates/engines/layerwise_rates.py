"""Layer-wise learning rate decay: layers closer to the input learn slower (Howard and Ruder, 2018; ELECTRA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rapidformer_templates.engines.recipe import GroupOptions
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import canonical_name, find_blocks


def depths_of(model: nn.Module) -> dict[str, int]:
    """Return the depth of parameters below the end of their stack, by the prefix of their canonical name.

    The last block has depth 1. Modules before the first block (embeddings) are one deeper than that block. Parameters
    without an entry follow the blocks. An encoder and a decoder are two stacks. Empty for a model without repeated
    blocks.
    """
    blocks = [canonical_name(name) for name in find_blocks(model)]
    stacks: dict[str, list[str]] = {}
    for block in blocks:
        stacks.setdefault(block.rpartition(".")[0], []).append(block)
    depths = {f"{block}.": len(stack) - i for stack in stacks.values() for i, block in enumerate(stack)}
    return depths | dict.fromkeys(_before(model, blocks[0]), 1 + max(depths.values())) if blocks else {}


def depth_of(name: str, depths: Mapping[str, int]) -> int:
    """Return the depth of a parameter by its canonical name. 0 for parameters after the blocks."""
    return next((depth for beginning, depth in depths.items() if name.startswith(beginning)), 0)


def layerwise(depths: Mapping[str, int], decay: float, peak: float, options: GroupOptions) -> GroupOptions:
    """Add a learning rate for each layer to ``options``.

    Args:
        depths: result of :func:`depths_of` for the model as it was built.
        decay: factor of the learning rate from a layer to the one below it.
        peak: learning rate of the parameters after the blocks.

    Raises:
        ModelError: the model has no repeated blocks.
    """
    if not depths:
        raise ModelError(
            "the model has no blocks that follow each other",
            where="--layerwise-lr-decay",
            hint="keep them in a torch.nn.ModuleList, or give the options of groups in build_optimizer()",
        )

    def with_rates(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        depth = depth_of(name, depths)
        return {**options(name, parameter), **({"lr": peak * decay**depth} if depth else {})}

    return with_rates


def _before(model: nn.Module, block: str) -> list[str]:
    """Return name prefixes of the parameters in modules before a block."""
    names: list[str] = []
    for name, module in model.named_modules():
        found = canonical_name(name)
        if found == block:
            break
        if any(True for _ in module.parameters(recurse=False)):
            names += [f"{found}."] if found else [own for own, _ in module.named_parameters(recurse=False)]
    return names
