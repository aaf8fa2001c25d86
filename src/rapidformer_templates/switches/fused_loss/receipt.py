"""Which tensors as wide as the vocabulary come to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WidestRows(TorchDispatchMode):
    """Notes the largest tensor of floating-point numbers with a last dimension of ``width``, whoever makes it.

    Views are not counted: the transposed weight of the head is one.

    Attributes:
        rows: rows of that tensor.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not _is_view(function):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[-1:] == (self.width,):
                    self.rows = max(self.rows, leaf.numel() // self.width)
        return result


def _is_view(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "is_view", False))
