"""Layer-wise learning rate decay: layers closer to the input learn slower (Howard and Ruder, 2018; ELECTRA)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.recipe import GroupOptions
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import canonical_name, find_blocks


class FirstUses(TorchFunctionMode):
    """Records inside the context in which order a forward first computes with the parameters of a model.

    Attributes:
        names: canonical names of the parameters that were used.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
        self._unused = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in ("__get__", "dim", "size"):  # reading a type or a shape does not count
            for leaf in tree_leaves((args, kwargs)):
                name = self._unused.pop(id(leaf), None)
                if name is not None:
                    self.names.append(name)
        return func(*args, **(kwargs or {}))


def depths_of(model: nn.Module, uses: Sequence[str] | None = None) -> dict[str, int]:
    """Return the depth of parameters below the end of their stack: by name, and for blocks by its beginning.

    The last block has depth 1. Parameters that are used before the first block (embeddings) are one deeper than that
    block. Parameters that follow the blocks have depth 0. An encoder and a decoder are two stacks. Empty for a model
    without repeated blocks.

    Args:
        uses: canonical names in the order in which a forward uses them. The default is the order of declaration.
    """
    stacks: dict[str, list[str]] = {}
    for block in (canonical_name(name) for name in find_blocks(model)):
        stacks.setdefault(block.rpartition(".")[0], []).append(f"{block}.")
    depths = {block: len(stack) - i for stack in stacks.values() for i, block in enumerate(stack)}
    names = [canonical_name(name) for name, _ in model.named_parameters()]
    positions = {name: position for position, name in enumerate(names if uses is None else uses)}
    starts = {
        name: min((p for other, p in positions.items() if other.startswith(tuple(stack))), default=0)
        for name, stack in stacks.items()
    }
    outside = [name for name in names if not name.startswith(tuple(depths))] if stacks else []
    for name in outside:
        near = _nearest(name, stacks)
        is_before = name in positions and positions[name] < min(starts[stack] for stack in near)
        depths[name] = 1 + max(len(stacks[stack]) for stack in near) if is_before else 0
    return depths


def _nearest(name: str, stacks: Iterable[str]) -> list[str]:
    """Return the stacks whose names share most parents with a parameter: those of its half in an encoder-decoder."""
    parents = name.split(".")
    shared = {}
    for stack in stacks:
        pairs = zip(parents, stack.split("."), strict=False)
        shared[stack] = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return [stack for stack, count in shared.items() if count == max(shared.values())]


def depth_of(name: str, depths: Mapping[str, int]) -> int:
    """Return the depth of a parameter by its canonical name.

    A parameter that a switch has added, such as an adapter, has the depth of its layer.
    """
    if name in depths:
        return depths[name]
    for beginning, depth in depths.items():
        if beginning.endswith(".") and name.startswith(beginning):
            return depth
    layers = {layer_name.rpartition(".")[0]: depth for layer_name, depth in depths.items()}
    parts = name.split(".")
    outer = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((layers[layer] for layer in outer if layer in layers), 0)


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

    def with_rates(name: str, parameter: nn.Parameter) -> Mapping[str, object]:
        depth = depth_of(name, depths)
        return {**options(name, parameter), **({"lr": peak * decay**depth} if depth else {})}

    return with_rates
