"""Positions of the values of a shard in the whole tensor, and which worker sends which of them to another one.

The local part of a tensor is not always a single box. For a fused query-key-value matrix, a rank holds a block of each
of the three parts. The placement records this (torch's ``_StridedShard``, whose split factor is the number of parts).
A shard has the whole local part of a rank, or a run of it if several ranks share its update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

SHARDS = "shards"
"""The mesh dimension along which FSDP shards a worker's part of a tensor."""

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


@dataclass(frozen=True)
class Index:
    """The values of a whole tensor that a shard has.

    Attributes:
        boxes: the boxes of the local part of this rank: one for a plain tensor, none for an empty part. To read a
            checkpoint, fill ``local[box.local]`` from ``whole[box.whole]`` for each box. Write one the other way round.
        local: shape of the local part.
        start: first element of a run of the flattened local part. None if the shard is the whole local part.
    """

    boxes: Sequence[Box]
    local: tuple[int, ...]
    start: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Index:
        """Return the index of this rank's part of a tensor."""
        if not isinstance(tensor, DTensor):
            return cls.whole(tensor.shape)
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "a tensor of another rank's mesh"
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        sides = list(zip(names, tensor.placements, mesh.shape, coordinate, strict=True))
        # FSDP shards the part of a tensor-parallel worker. Torch writes this the other way round, for equal parts only.
        for side in list(sides):
            if side[0] == SHARDS and isinstance(side[1], _StridedShard):
                sides.remove(side)
                sides.append((SHARDS, Shard(side[1].dim), *side[2:]))
        _, placements, sizes, place = zip(*sides, strict=True)
        return cls.of_rank(tuple(tensor.shape), placements, sizes, place)

    @classmethod
    def of_rank(
        cls, shape: tuple[int, ...], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
    ) -> Index:
        """Return the index of the part that any rank holds of a tensor, without a process group.

        Args:
            shape: shape of the whole tensor.
            placements: one for each dimension of the mesh.
            mesh: size of each mesh dimension.
            coordinate: coordinate of the rank in the mesh.
        """
        segments: list[Segments] = [[(0, length)] for length in shape]  # the ranges of each dimension
        for placement, size, rank in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
                segments[placement.dim] = list(_share(segments[placement.dim], parts, size, rank))
        starts = [itertools.accumulate((length for _, length in dim), initial=0) for dim in segments]
        pairs_of_dims = [list(zip(dim, start, strict=False)) for dim, start in zip(segments, starts, strict=True)]
        boxes = [
            Box(
                offset=tuple(start for (start, _), _ in pairs),
                shape=tuple(length for (_, length), _ in pairs),
                local=tuple(slice(at, at + length) for (_, length), at in pairs),
            )
            for pairs in itertools.product(*pairs_of_dims)
        ]
        return cls(boxes, tuple(sum(length for _, length in dim) for dim in segments))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Index:
        """Return the index of a whole tensor."""
        return cls.of_rank(tuple(shape), (), (), ())

    def run(self, start: int) -> Index:
        """Return the index of a run that begins at an element of the flattened local part."""
        return replace(self, start=start)

    @property
    def has_first_element(self) -> bool:
        """Whether the first element of the whole tensor is in it."""
        return not self.start and bool(self.boxes) and not any(self.boxes[0].offset)

    def parts(self, values: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield (offset in the whole tensor, values) of each box. The values are views.

        Args:
            values: the values of the shard: the local part in its shape, or a run of any shape.
        """
        if self.start is None:
            yield from ((box.offset, values[box.local]) for box in self.boxes)
            return
        flat, done = values.view(-1), 0
        for offset, shape in boxes_of_run(self.local, self.start, flat.numel()):
            count = math.prod(shape)
            part = flat[done : done + count].view(shape)
            done += count
            for box in self.boxes:
                lows = [max(o, b.start) for o, b in zip(offset, box.local, strict=True)]
                highs = [min(o + s, b.stop) for o, s, b in zip(offset, shape, box.local, strict=True)]
                if all(low < high for low, high in zip(lows, highs, strict=True)):
                    whole = tuple(w + low - b.start for w, low, b in zip(box.offset, lows, box.local, strict=True))
                    inside = tuple(slice(low - o, high - o) for low, high, o in zip(lows, highs, offset, strict=True))
                    yield whole, part[inside]


def divided_over(tensor: torch.Tensor, dimension: str) -> int:
    """Return how many workers along a mesh dimension hold different parts of a tensor. 1 if they hold the same."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    sides = zip(mesh.mesh_dim_names or (), mesh.shape, tensor.placements, strict=False)
    return math.prod(size for name, size, placement in sides if name == dimension and not placement.is_replicate())


def _share(segments: Segments, parts: int, size: int, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the share of ``rank`` in each of ``parts`` equal parts of ``segments``, split like ``torch.chunk``."""
    total = sum(length for _, length in segments)
    if total % parts:
        raise ValueError(f"{total} cannot be divided into {parts} parts")
    for part in range(parts):
        length = total // parts
        step = math.ceil(length / size)
        begin, end = min(rank * step, length), min((rank + 1) * step, length)
        at = -part * length  # where the next segment begins in this part
        for start, count in segments:
            low, high = max(begin, at), min(end, at + count)
            if low < high:
                yield start + low - at, high - low
            at += count


def boxes_of_run(shape: Sequence[int], start: int, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes of a run of a flattened row-major tensor, in its order.

    A run may begin and end anywhere. So it consists of at most a part of a first row, whole rows and a part of a last
    row, and the same again inside those parts: ``2 n - 1`` boxes for ``n`` dimensions.

    Args:
        shape: shape of the tensor.
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


def _in_row(
    shape: Sequence[int], index: int, start: int, count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in boxes_of_run(shape[1:], start, count):
        yield (index, *offset), (1, *size)


@dataclass(frozen=True)
class Parts:
    """The part of a tensor that each worker gets.

    Attributes:
        placements: how the tensor is divided over ``sizes`` workers. Each placement divides a part of the one before.
        ranks: the ranks among them, for each worker that builds the model. Several workers may get the same part.
    """

    placements: tuple[Placement, ...]
    sizes: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    def index(self, shape: tuple[int, ...], worker: int) -> Index:
        """Return the values of a tensor of ``shape`` that a worker gets."""
        return Index.of_rank(shape, self.placements, self.sizes, self.ranks[worker])

    def take(self, whole: torch.Tensor, worker: int) -> torch.Tensor:
        """Copy the values of a whole tensor that a worker gets."""
        index = self.index(tuple(whole.shape), worker)
        local = whole.new_empty(index.local)
        for box in index.boxes:
            local[box.local] = whole[box.whole]
        return local

    def then(self, inner: Parts) -> Parts:
        """Return the parts of these parts that each worker gets."""
        ranks = tuple(outer + own for outer, own in zip(self.ranks, inner.ranks, strict=True))
        return Parts(self.placements + inner.placements, self.sizes + inner.sizes, ranks)


View = tuple[torch.Size, tuple[int, ...], int]
"""Arguments of ``torch.Tensor.as_strided``: size, stride and offset."""


def _view_of(tensor: torch.Tensor) -> View:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


class PartExchange(NamedTuple):
    """The values of a tensor that this worker sends to another one from its share, and receives for its part."""

    peer: int
    sent: Sequence[View]
    received: Sequence[View]


@lru_cache(maxsize=256)  # the blocks of a model have the same shapes
def exchanges_of(shape: tuple[int, ...], parts: Parts, count: int, worker: int) -> Sequence[PartExchange]:
    """Return what a worker exchanges with each other one, so that all get their parts of a tensor.

    Args:
        count: elements of the share that each worker has.
    """
    total = math.prod(shape)
    own, part = parts.index(shape, worker), torch.empty(parts.index(shape, worker).local, device="meta")
    sent_to: dict[tuple[int, ...], list[View]] = {}  # by the ranks of the receiver
    exchanges = []
    for peer, rank in enumerate(parts.ranks):
        if rank not in sent_to:
            common = _in_share(shape, parts.index(shape, peer), worker, count, total)
            sent_to[rank] = [_view_of(values) for _, values in common]
        received = [_view_of(part[place]) for place, _ in _in_share(shape, own, peer, count, total)]
        if sent_to[rank] or received:
            exchanges.append(PartExchange(peer, sent_to[rank], received))
    return exchanges


def _in_share(
    shape: tuple[int, ...], index: Index, worker: int, count: int, total: int
) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Yield (position in the part, values) for each box that a part has in common with the share of a worker."""
    start, end = min(worker * count, total), min((worker + 1) * count, total)
    swapped = [Box(tuple(of.start for of in box.local), box.shape, box.whole) for box in index.boxes]
    for offset, values in Index(swapped, shape, start).parts(torch.empty(end - start, device="meta")):
        yield tuple(slice(o, o + s) for o, s in zip(offset, values.shape, strict=True)), values


@lru_cache(maxsize=256)
def starts_in_file(shape: tuple[int, ...], parts: Parts) -> Sequence[int] | None:
    """Return where each worker's part begins in the flattened tensor. None if a part is not a run of whole rows."""
    starts = []
    for boxes in (parts.index(shape, worker).boxes for worker in range(len(parts.ranks))):
        if len(boxes) > 1 or (boxes and boxes[0].shape[1:] != shape[1:]):
            return None
        starts.append(boxes[0].offset[0] * math.prod(shape[1:]) if boxes else 0)
    return starts
