"""Runs of a flattened tensor as boxes: what ZeRO holds of a parameter, in the form that checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from rapidformer_templates.engines.contract import Piece, StateReader

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) in a tensor."""


def boxes(shape: Sequence[int], start: int, count: int) -> Iterator[Box]:
    """The boxes that a run of a row-major tensor consists of, in its order.

    A run begins and ends anywhere, so it is at most a part of a first row, whole rows and a part of
    a last one, and so on inside the parts: ``2 n - 1`` boxes for ``n`` dimensions.

    Args:
        shape: of the whole tensor.
        start: first element of the run in the flattened tensor.
        count: elements of the run.
    """
    if count == 0:
        return
    if len(shape) < 2:
        yield ((start,), (count,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    index, inside = divmod(start, row)
    if inside:
        head = min(row - inside, count)
        yield from _in_row(shape, index, inside, head)
        index, count = index + 1, count - head
    rows, tail = divmod(count, row)
    if rows:
        yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
    yield from _in_row(shape, index + rows, 0, tail)


def _in_row(shape: Sequence[int], index: int, start: int, count: int) -> Iterator[Box]:
    for offset, size in boxes(shape[1:], start, count):
        yield (index, *offset), (1, *size)


def pieces_of(name: str, shape: Sequence[int], start: int, values: torch.Tensor) -> Iterator[Piece]:
    """A run that begins at ``start`` of a tensor, with its values (1-D), as pieces."""
    done = 0
    for offset, size in boxes(shape, start, values.numel()):
        count = math.prod(size)
        yield Piece(name, values[done : done + count].view(size), tuple(shape), offset)
        done += count


def read_into(
    target: torch.Tensor, reader: StateReader, kind: str, name: str, shape: Sequence[int], start: int
) -> None:
    """Fill ``target`` (1-D) with the run of a tensor of a checkpoint that begins at ``start``."""
    done = 0
    for offset, size in boxes(shape, start, target.numel()):
        count = math.prod(size)
        target[done : done + count].copy_(reader.read(kind, name, offset, size).reshape(-1))
        done += count
