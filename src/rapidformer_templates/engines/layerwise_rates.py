"""Layer-wise decay of the learning rate: the nearer to the input, the slower (Howard and Ruder, 2018; ELECTRA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rapidformer_templates.engines.recipe import GroupOptions
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import canonical_name, find_blocks


def layerwise(model: nn.Module, decay: float, peak: float, options: GroupOptions) -> GroupOptions:
    """Group options with a learning rate for each layer, besides what ``options`` says.

    The last block of a stack of ``n`` learns at ``decay`` of the peak, the first at its ``n``-th power, what the model
    has before its first block (embeddings) at the next one, and what follows the blocks (norms, heads) at the peak. An
    encoder and a decoder are two stacks.

    Args:
        model: as it was built; its parameters are asked for by their canonical names.
        decay: of the rate from a layer to the one below it.
        peak: the learning rate.

    Raises:
        ModelError: the model has no repeated blocks.
    """
    blocks = [canonical_name(name) for name in find_blocks(model)]
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no blocks that follow each other",
            where="--layerwise-lr-decay",
            hint="keep them in a torch.nn.ModuleList, or give the options of groups in build_optimizer()",
        )
    rates = {f"{block}.": decay**power for block, power in _powers(blocks).items()}
    lowest = decay ** (1 + max(_powers(blocks).values()))
    rates |= dict.fromkeys(_before(model, blocks[0]), lowest)

    def with_rates(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        share = next((share for part, share in rates.items() if name.startswith(part)), 1.0)
        return {**options(name, parameter), **({} if share == 1.0 else {"lr": peak * share})}

    return with_rates


def _powers(blocks: list[str]) -> dict[str, int]:
    """How many layers each block is below the end of its stack."""
    stacks: dict[str, list[str]] = {}
    for block in blocks:
        stacks.setdefault(block.rpartition(".")[0], []).append(block)
    return {block: len(stack) - place for stack in stacks.values() for place, block in enumerate(stack)}


def _before(model: nn.Module, block: str) -> list[str]:
    """Modules that have parameters of their own and stand before a block, as beginnings of their parameters' names."""
    names: list[str] = []
    for name, module in model.named_modules():
        found = canonical_name(name)
        if found == block:
            break
        if any(True for _ in module.parameters(recurse=False)):
            names += [f"{found}."] if found else [own for own, _ in module.named_parameters(recurse=False)]
    return names
