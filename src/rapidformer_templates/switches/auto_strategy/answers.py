"""Answers to questions that a model asks about data, for tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NUMBER = torch.ops.aten._local_scalar_dense.default
_POSITIONS = torch.ops.aten.nonzero.default
_COUNTS = torch.ops.aten.bincount.default
_GROUPED = torch.ops.aten._grouped_mm.default
DATA_DEPENDENT_OPS = frozenset({_NUMBER, _POSITIONS, _COUNTS, _GROUPED})
"""Operations whose result or shape depends on data, and grouped products, which torch fakes only in 16 bits."""


def answer(question: Any, args: Any, *, dense: bool) -> Any:
    """Return a fake answer. A mask hides nothing or something, documents are not packed, and all rows count.

    Args:
        question: one of ``DATA_DEPENDENT_OPS``.
        args: arguments of the operation. The first is the tensor.
        dense: whether a mask hides nothing.
    """
    tensor = args[0]
    if question is _POSITIONS:
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
    if question is _COUNTS:
        return tensor.new_empty((args[2],), dtype=torch.int64)  # the highest possible number
    if question is _GROUPED:
        return _grouped_product(*args[:3])
    return dense if tensor.dtype == torch.bool else 1


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group by its matrix. For two flat operands, return one product per group."""
    groups = [len(ends)] if left.ndim == right.ndim == 2 else []
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


class FakeDataReads(TorchDispatchMode):
    """Answers a model's questions about data in code that is not traced."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self._dense = dense

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(func, args, dense=self._dense) if func in DATA_DEPENDENT_OPS else func(*args, **(kwargs or {}))
