"""Shapes of logits whose last dimension, the words, is missing or divided on this worker.

Two kinds of objects replace such logits. Logits that are never computed are a tuple, because ZeRO-3 replaces tensors
that a module returns. Divided logits are a tensor, because any code may ask for the whole. The same operations on their
rows are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def rows_of_view(sizes: Sequence[int], shape: Sequence[int]) -> list[int] | None:
    """Return the leading dimensions of a view, with a last -1 resolved. None if the view does not keep the words.

    Args:
        sizes: the arguments of ``view`` or ``reshape``.
        shape: shape of the logits.
    """
    *rows, words = sizes or (0,)
    if words == -1:
        others = math.prod(rows)
        words = math.prod(shape) // others if others > 0 else 0
    return rows if sizes and words == shape[-1] else None


def flattens_rows(dimensions: int, start: int, end: int) -> bool:
    """Return whether ``flatten`` keeps the last dimension."""
    last = dimensions - 1
    return end % dimensions != last or start % dimensions == last


def selects_rows(index: Any, dimensions: int) -> bool:
    """Return whether an index takes all of the last dimension."""
    entries = index if isinstance(index, tuple) else (index,)
    named = sum(_dimensions_of(entry) for entry in entries)
    dots = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if isinstance(entries[-1], slice) and entries[-1] == slice(None) and len(dots) < 2:
        return True
    return named < dimensions and dots in ([], [len(entries) - 1])


def _dimensions_of(entry: Any) -> int:
    """Return how many dimensions an entry of an index consumes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.ndim if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool else 1
