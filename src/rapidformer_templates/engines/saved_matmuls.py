"""Detects whether matmul outputs are saved for the backward, so that their memory must not be reused."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import create_selective_checkpoint_contexts


class SavesMatmuls:
    """Marks a dispatch mode that saves matmul outputs of a forward for its backward."""


_SAVING_MODES: tuple[type, ...] = (SavesMatmuls, *(type(mode) for mode in create_selective_checkpoint_contexts([])))


def matmuls_are_saved() -> bool:
    """Whether the output that a layer has just computed must not be modified.

    A compiled graph manages memory itself. Code that cannot be compiled runs inside the same dispatch modes of torch.
    """
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(mode, _SAVING_MODES) for mode in _get_current_dispatch_mode_stack())
