"""Products that a recomputation keeps: their memory is theirs until the backward."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import create_selective_checkpoint_contexts


class KeepsProducts:
    """Of a dispatch mode of our own around a forward whose products are read again in its backward."""


_KEEPING: tuple[type, ...] = (KeepsProducts, *(type(mode) for mode in create_selective_checkpoint_contexts([])))


def products_are_kept() -> bool:
    """Whether what a layer has just computed must be left as it is.

    A graph reuses memory by itself; and code that cannot become one runs inside of the same modes of torch.
    """
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(mode, _KEEPING) for mode in _get_current_dispatch_mode_stack())
