"""The tensors that a computation makes."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Records the shapes of all output tensors of operators, without wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    @property
    def largest(self) -> int:
        """Number of elements of the largest tensor."""
        return max(map(math.prod, self.shapes), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.shapes |= {tuple(leaf.shape) for leaf in leaves if not isinstance(leaf, DTensor)}
        return out
