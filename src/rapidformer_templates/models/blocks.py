"""The blocks of a model, its width and the sizes of its parameters. All engines, switches and receipts use these."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import nn

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_SHAPE = "_shape_of_numbers"

BlockArguments = tuple[tuple[object, ...], dict[str, object]]
"""The positional and keyword arguments of a block."""

BlockOutput = torch.Tensor | tuple[torch.Tensor, *tuple[object, ...]]
"""The output of a block: hidden states, or a tuple that begins with them."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    >>> canonical_name("module.h.0._checkpoint_wrapped_module.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape, also for parameters that ZeRO-3 has partitioned or that are quantized."""
    return tuple(getattr(tensor, _SHAPE if is_quantized(tensor) else "ds_shape", tensor.shape))


def note_shape(codes: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Record the shape of the numbers that a tensor of quantized codes represents."""
    setattr(codes, _SHAPE, shape)


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds quantized codes: bytes that represent numbers with fewer bits."""
    return hasattr(tensor, _SHAPE)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the full parameter."""
    return tensor.nbytes if is_quantized(tensor) else math.prod(shape_of(tensor)) * tensor.element_size()


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of ``model`` by name, in order.

    A transformers model names the classes that must not be split (``_no_split_modules``). Otherwise the blocks are the
    longest ``ModuleList`` or ``Sequential`` of modules of one class.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks = {name: module for name, module in model.named_modules() if type(module).__name__ in named}
    # An embedding may also be listed as unsplittable. Only blocks have a number as their name in a list.
    blocks = {name: module for name, module in blocks.items() if name.rsplit(".", 1)[-1].isdecimal()}
    return blocks or _longest_list(model)


def _longest_list(model: nn.Module) -> dict[str, nn.Module]:
    best: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
        same_kind = len({type(child) for child in children.values()}) == 1
        has_parameters = all(next(child.parameters(), None) is not None for child in children.values())
        if same_kind and has_parameters and len(children) > max(1, len(best)):
            best = children
    return best


def width_of(model: nn.Module) -> int:
    """Return the width of ``model`` from its configuration, or else from its matrices.

    A transformers configuration has it as ``hidden_size``, as the largest of ``hidden_sizes``, or in its
    ``text_config`` [D]. For another model each matrix adds its number of elements to the counts of both of its
    dimensions. The size with the highest count is the width. A tie goes to the smaller size. This works because each
    matrix of a transformer maps from or to the width. A model without a matrix has the width 1.
    """
    config = getattr(model, "config", None)
    for one in (config, getattr(config, "text_config", None)):
        sizes = [getattr(one, "hidden_size", None), *(getattr(one, "hidden_sizes", None) or ())]
        widths = [size for size in sizes if isinstance(size, int) and size > 0]
        if widths:
            return max(widths)
    elements: Counter[int] = Counter()
    for rows, columns in (shape for shape in map(shape_of, model.parameters()) if len(shape) == 2):
        for size in {rows, columns}:
            elements[size] += rows * columns
    return max(elements, key=lambda size: (elements[size], -size), default=1)
