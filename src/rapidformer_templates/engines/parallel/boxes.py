"""Where the values of a sharded tensor lie in the whole one.

A shard is not always one box: of a fused query-key-value matrix a rank holds a block of each of the three
parts. Its placement says so (``_StridedShard`` of torch, whose split factor is the number of parts), and
everything here is read off the placements; nothing is kept beside the tensor.
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
"""(start, length) of the stretches of a dimension that a rank holds, in the order in which it holds them."""


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor that a rank holds.

    Attributes:
        offset: where it begins in the whole tensor.
        shape: its lengths.
        local: where it lies in the local tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[slice, ...]

    @property
    def whole(self) -> tuple[slice, ...]:
        """Where it lies in the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor that ``tensor`` is a part of."""
    return shape_of(tensor)


def local_boxes(tensor: torch.Tensor) -> list[Box]:
    """The boxes that make up what this rank holds of a tensor; one for a plain tensor, none for an empty shard.

    Read a checkpoint by filling ``local[box.local]`` from ``whole[box.whole]`` for each of them, and write one the
    other way round. Optimizer state that has its parameter's placements has its boxes, too.
    """
    if not isinstance(tensor, DTensor):
        return boxes_of(tuple(tensor.shape), (), (), ())
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a tensor of another rank's mesh"
    return boxes_of(tuple(tensor.shape), tensor.placements, tuple(tensor.device_mesh.shape), coordinate)


def divided_over(tensor: torch.Tensor, dimension: str) -> int:
    """How many workers along a dimension of its mesh hold different parts of a tensor; 1 if they hold the same."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    sides = zip(mesh.mesh_dim_names or (), mesh.shape, tensor.placements, strict=False)
    return math.prod(size for name, size, placement in sides if name == dimension and not placement.is_replicate())


def boxes_of(
    shape: tuple[int, ...], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Box]:
    """As :func:`local_boxes`, for any rank and without a process group.

    Args:
        shape: of the whole tensor.
        placements: one for each dimension of the mesh.
        mesh: lengths of the mesh.
        coordinate: of the rank in the mesh.
    """
    held: list[Segments] = [[(0, length)] for length in shape]
    for placement, size, rank in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            held[placement.dim] = list(_share(held[placement.dim], parts, size, rank))
    if not all(held):
        return []
    return [
        Box(
            offset=tuple(start for start, _, _ in stretches),
            shape=tuple(length for _, length, _ in stretches),
            local=tuple(slice(at, at + length) for _, length, at in stretches),
        )
        for stretches in itertools.product(*(_with_offsets(segments) for segments in held))
    ]


def local_shape(
    shape: tuple[int, ...], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape of what a rank holds of a tensor of ``shape``."""
    lengths = list(shape)
    for placement, size, rank in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            held = _share([(0, lengths[placement.dim])], parts, size, rank)
            lengths[placement.dim] = sum(length for _, length in held)
    return tuple(lengths)


def local_values(
    whole: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """What a rank holds of ``whole``, in memory of its own."""
    shape = tuple(whole.shape)
    local = whole.new_empty(local_shape(shape, placements, mesh, coordinate))
    for box in boxes_of(shape, placements, mesh, coordinate):
        local[box.local] = whole[box.whole]
    return local


def _share(segments: Segments, parts: int, size: int, rank: int) -> Iterator[tuple[int, int]]:
    """The share of ``rank`` in each of ``parts`` equal parts of what ``segments`` cover, as ``torch.chunk`` cuts."""
    total = sum(length for _, length in segments)
    if total % parts:
        raise ValueError(f"{total} cannot be divided into {parts} parts")
    for part in range(parts):
        length = total // parts
        step = math.ceil(length / size)
        begin, end = min(rank * step, length), min((rank + 1) * step, length)
        yield from _between(segments, part * length + begin, part * length + end)


def _between(segments: Segments, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The stretches of ``segments`` from ``begin`` to ``end``, counted in what they cover."""
    at = 0
    for start, length in segments:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            yield start + low - at, high - low
        at += length


def _with_offsets(segments: Segments) -> list[tuple[int, int, int]]:
    """(start in the whole, length, start in the local tensor) of each segment."""
    at = itertools.accumulate((length for _, length in segments), initial=0)
    return [(start, length, begin) for (start, length), begin in zip(segments, at, strict=False)]
