"""Positions of the values of a sharded tensor in the whole tensor.

A shard is not always a single box. For a fused query-key-value matrix, a rank holds a block of each of the three
parts. The placement records this (torch's ``_StridedShard``, whose split factor is the number of parts). Everything in
this module is computed from the placements, without other state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rapidformer_templates.models.blocks import shape_of

Segments = list[tuple[int, int]]
"""(start, length) of the ranges of a dimension that a rank holds, in their local order."""


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor that a rank holds.

    Attributes:
        offset: position in the whole tensor.
        shape: size of the box.
        local: position in the local tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[slice, ...]

    @property
    def whole(self) -> tuple[slice, ...]:
        """Position in the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that ``tensor`` is a part of."""
    return shape_of(tensor)


def local_boxes(tensor: torch.Tensor) -> list[Box]:
    """Return the boxes of a tensor that this rank holds: one for a plain tensor, none for an empty shard.

    To read a checkpoint, fill ``local[box.local]`` from ``whole[box.whole]`` for each box. Write one the other way
    round. Optimizer state with the placements of its parameter also has its boxes.
    """
    if not isinstance(tensor, DTensor):
        return boxes_of(tuple(tensor.shape), (), (), ())
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a tensor of another rank's mesh"
    return boxes_of(tuple(tensor.shape), tensor.placements, tuple(tensor.device_mesh.shape), coordinate)


def divided_over(tensor: torch.Tensor, dimension: str) -> int:
    """Return how many workers along a mesh dimension hold different parts of a tensor. 1 if they hold the same."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    sides = zip(mesh.mesh_dim_names or (), mesh.shape, tensor.placements, strict=False)
    return math.prod(size for name, size, placement in sides if name == dimension and not placement.is_replicate())


def boxes_of(
    shape: tuple[int, ...], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Box]:
    """Compute :func:`local_boxes` for any rank, without a process group.

    Args:
        shape: shape of the whole tensor.
        placements: one for each dimension of the mesh.
        mesh: size of each mesh dimension.
        coordinate: coordinate of the rank in the mesh.
    """
    segments_of_dims: list[Segments] = [[(0, length)] for length in shape]
    for placement, size, rank in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            segments_of_dims[placement.dim] = list(_share(segments_of_dims[placement.dim], parts, size, rank))
    if not all(segments_of_dims):
        return []
    return [
        Box(
            offset=tuple(start for start, _, _ in stretches),
            shape=tuple(length for _, length, _ in stretches),
            local=tuple(slice(at, at + length) for _, length, at in stretches),
        )
        for stretches in itertools.product(*(_with_offsets(segments) for segments in segments_of_dims))
    ]


def local_shape(
    shape: tuple[int, ...], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the part that a rank holds of a tensor of ``shape``."""
    lengths = list(shape)
    for placement, size, rank in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            segments = _share([(0, lengths[placement.dim])], parts, size, rank)
            lengths[placement.dim] = sum(length for _, length in segments)
    return tuple(lengths)


def local_values(
    whole: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Copy the part of ``whole`` that a rank holds."""
    shape = tuple(whole.shape)
    local = whole.new_empty(local_shape(shape, placements, mesh, coordinate))
    for box in boxes_of(shape, placements, mesh, coordinate):
        local[box.local] = whole[box.whole]
    return local


def _share(segments: Segments, parts: int, size: int, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the share of ``rank`` in each of ``parts`` equal parts of ``segments``, split like ``torch.chunk``."""
    total = sum(length for _, length in segments)
    if total % parts:
        raise ValueError(f"{total} cannot be divided into {parts} parts")
    for part in range(parts):
        length = total // parts
        step = math.ceil(length / size)
        begin, end = min(rank * step, length), min((rank + 1) * step, length)
        yield from _between(segments, part * length + begin, part * length + end)


def _between(segments: Segments, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``segments`` between the positions ``begin`` and ``end`` of their concatenation."""
    at = 0
    for start, length in segments:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            yield start + low - at, high - low
        at += length


def _with_offsets(segments: Segments) -> list[tuple[int, int, int]]:
    """Return (start in the whole tensor, length, start in the local tensor) of each segment."""
    at = itertools.accumulate((length for _, length in segments), initial=0)
    return [(start, length, begin) for (start, length), begin in zip(segments, at, strict=False)]
