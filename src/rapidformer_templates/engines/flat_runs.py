"""Runs of a flattened tensor as boxes: the part of a parameter that ZeRO holds, in the form of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from rapidformer_templates.engines.contract import Piece, StateReader

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) in a tensor."""


def boxes(shape: Sequence[int], start: int, count: int) -> Iterator[Box]:
    """Yield the boxes of a run of a row-major tensor, in its order.

    A run may begin and end anywhere. So it consists of at most a part of a first row, whole rows and a part of a last
    row, and the same again inside those parts: ``2 n - 1`` boxes for ``n`` dimensions.

    Args:
        shape: shape of the whole tensor.
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
    """Yield the pieces of a run that begins at ``start`` of a tensor and has ``values`` (1-D)."""
    done = 0
    for offset, size in boxes(shape, start, values.numel()):
        count = math.prod(size)
        yield Piece(name, values[done : done + count].view(size), tuple(shape), offset)
        done += count


def read_into(
    target: torch.Tensor, reader: StateReader, kind: str, name: str, shape: Sequence[int], start: int
) -> None:
    """Fill ``target`` (1-D) with the run from ``start`` of a tensor in a checkpoint."""
    done = 0
    for offset, size in boxes(shape, start, target.numel()):
        count = math.prod(size)
        target[done : done + count].copy_(reader.read(kind, name, offset, size).reshape(-1))
        done += count
