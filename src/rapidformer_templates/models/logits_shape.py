"""Which shapes logits may take whose last dimension, the words, is not there or not whole on this worker.

What stands for such logits differs: a tuple for those that are never computed, since ZeRO-3 puts other tensors in the
place of those that a module returns, and a tensor for those that are divided, since any code may ask for the whole.
What may be done to their rows is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def rows_of_view(sizes: Sequence[int], shape: Sequence[int]) -> list[int] | None:
    """The leading dimensions of a view, resolved where the last is -1; None if it does not keep the words.

    Args:
        sizes: as asked of ``view`` or ``reshape``.
        shape: of the logits.
    """
    *rows, words = sizes or (0,)
    if words == -1:
        others = math.prod(rows)
        words = math.prod(shape) // others if others > 0 else 0
    return rows if sizes and words == shape[-1] else None


def flattens_rows(dimensions: int, start: int, end: int) -> bool:
    """Whether ``flatten`` leaves the last dimension alone."""
    last = dimensions - 1
    return end % dimensions != last or start % dimensions == last


def selects_rows(index: Any, dimensions: int) -> bool:
    """Whether an index takes all of the last dimension."""
    entries = index if isinstance(index, tuple) else (index,)
    named = sum(_dimensions_of(entry) for entry in entries)
    dots = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if isinstance(entries[-1], slice) and entries[-1] == slice(None) and len(dots) < 2:
        return True
    return named < dimensions and dots in ([], [len(entries) - 1])


def _dimensions_of(entry: Any) -> int:
    """How many dimensions an entry of an index takes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.ndim if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool else 1
