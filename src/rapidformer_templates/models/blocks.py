"""Where the blocks of a model are: one answer for sharding, checkpointing and receipts."""

from __future__ import annotations

import math

import torch
from torch import nn

from rapidformer_templates.models.placement import placement_of

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_SHAPE = "_shape_of_numbers"


def canonical_name(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    >>> canonical_name("module.h.0._checkpoint_wrapped_module.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The whole shape, also of a parameter that ZeRO-3 has partitioned, or whose numbers lie in codes."""
    return tuple(getattr(tensor, _SHAPE if lies_in_codes(tensor) else "ds_shape", tensor.shape))


def note_shape(codes: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Note of bytes the shape of the numbers that they stand for."""
    setattr(codes, _SHAPE, shape)


def lies_in_codes(tensor: torch.Tensor) -> bool:
    """Whether these are bytes that stand for numbers of fewer bits than a type's."""
    return hasattr(tensor, _SHAPE)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the whole parameter."""
    return tensor.nbytes if lies_in_codes(tensor) else math.prod(shape_of(tensor)) * tensor.element_size()


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of ``model`` by name, as they follow each other in it.

    A transformers model names the classes that must not be split (``_no_split_modules``); a model
    that names none has its blocks in its longest ``ModuleList`` or ``Sequential`` of equal modules. Of a model
    that was cut into pipeline stages, the blocks that are here.
    """
    if placement_of(model).parts is not None:
        return placement_of(model).blocks
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks = {name: module for name, module in model.named_modules() if type(module).__name__ in named}
    # An embedding may be listed as unsplittable, too; a block stands in a list beside others of its kind.
    blocks = {name: module for name, module in blocks.items() if name.rsplit(".", 1)[-1].isdigit()}
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
