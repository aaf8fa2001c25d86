"""Tensors without data: transformers treats them as real ones, and a model's questions about data have fake answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from rapidformer_templates.system.replaced_functions import patch_function

_as_if_real: ContextVar[bool] = ContextVar("fake tensors taken for real ones", default=False)


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Enable tensors without data. transformers takes the same path through a model as with data."""
    patch_function(import_utils, "is_fake_tensor", lambda check, tensor: not _as_if_real.get() and check(tensor))
    token = _as_if_real.set(True)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        _as_if_real.reset(token)


_NUMBER = torch.ops.aten._local_scalar_dense.default
_POSITIONS = torch.ops.aten.nonzero.default
_COUNTS = torch.ops.aten.bincount.default
_GROUPED = torch.ops.aten._grouped_mm.default
DATA_DEPENDENT_OPS = frozenset({_NUMBER, _POSITIONS, _COUNTS, _GROUPED})
"""Operations whose result or shape depends on data, and grouped products, which torch fakes only in 16 bits."""


def answer(question: OpOverload, args: Sequence[Any], *, dense: bool) -> torch.Tensor | bool | int:
    """Return a fake answer. A mask hides nothing or something, documents are not packed, and all rows count.

    Args:
        question: one of ``DATA_DEPENDENT_OPS``.
        args: arguments of the operation. The first is the tensor.
        dense: whether a mask hides nothing.
    """
    tensor: torch.Tensor = args[0]
    if question is _POSITIONS:
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
    if question is _COUNTS:
        return tensor.new_empty((args[2],), dtype=torch.int64)  # the highest possible number
    if question is _GROUPED:  # the product of each group's rows with its matrix
        left, right, ends = args[:3]
        groups = [len(ends)] if left.ndim == right.ndim == 2 else []  # two flat operands have a product per group
        return tensor.new_empty((*groups, left.shape[-2], right.shape[-1]))
    return dense if tensor.dtype == torch.bool else 1


class FakeDataReads(TorchDispatchMode):
    """Answers a model's questions about data in code that is not traced."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self._dense = dense

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        return answer(func, args, dense=self._dense) if func in DATA_DEPENDENT_OPS else func(*args, **(kwargs or {}))
