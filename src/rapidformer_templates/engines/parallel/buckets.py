"""Buckets of parameters packed end to end: the unit of a reduction, and which rank updates which run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from rapidformer_templates.planning.deepspeed_file.settings import smallest_bucket

Key = TypeVar("Key", bound=Hashable)

MAX_ELEMENTS = 2**23
"""Elements of the largest bucket: 32 MB in fp32, enough to saturate a link."""

MIN_BUCKETS_PER_RANK = 4
"""Minimum number of whole-parameter buckets per worker, if parameters are small enough. It balances the shares."""


def bucket_size_for(width: int, device: str) -> int:
    """Return the elements of a bucket: one matrix of a square block, like a ZeRO bucket. Small compared with a model.

    Args:
        width: hidden size of the model.
        device: kind of device.
    """
    return min(max(width * width, smallest_bucket(device)), MAX_ELEMENTS)


class Segment(NamedTuple):
    """A run of a flattened parameter.

    Attributes:
        parameter: index of the parameter.
        start: first element of the run.
        length: elements of the run.
    """

    parameter: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """Runs of consecutive parameters, packed end to end.

    Attributes:
        segments: the runs in their order.
        ranks: number of workers that share it. Each updates one of ``ranks`` equal shares. The last one is padded.
        owner: the rank that updates the whole bucket. None if the ranks share it.
    """

    segments: tuple[Segment, ...]
    ranks: int
    owner: int | None = None

    @cached_property
    def length(self) -> int:
        """Number of elements."""
        return sum(segment.length for segment in self.segments)

    @property
    def share(self) -> int:
        """Number of elements, with padding, in each nonempty share."""
        return self.length if self.owner is not None else -(-self.length // self.ranks)

    @property
    def packed(self) -> int:
        """Number of elements in all shares, which an exchange transfers."""
        return self.share if self.owner is not None else self.share * self.ranks

    def share_of(self, rank: int) -> int:
        """Return the number of elements, with padding, in a rank's share."""
        return self.share if self.owner in (None, rank) else 0

    def with_offsets(self) -> Iterator[tuple[Segment, int]]:
        """Yield the runs with their offsets in the bucket."""
        offset = 0
        for segment in self.segments:
            yield segment, offset
            offset += segment.length

    def owned(self, rank: int) -> Iterator[tuple[Segment, int]]:
        """Yield the runs in a rank's share, each with its offset in the share."""
        place = rank if self.owner is None else 0 if rank == self.owner else 1
        begin, end = place * self.share, (place + 1) * self.share
        for (index, start, count), offset in self.with_offsets():
            low, high = max(begin, offset), min(end, offset + count)
            if low < high:
                yield Segment(index, start + low - offset, high - low), low - begin


def split_into_buckets(sizes: Sequence[tuple[int, int]], ranks: int, limit: int) -> list[Bucket]:
    """Divide parameters, packed end to end, into buckets.

    Args:
        sizes: (index, elements) of each parameter.
        ranks: number of workers that share each bucket.
        limit: elements of a bucket, rounded down to a multiple of ``ranks``, so that only the last one is padded.
    """
    limit = max(1, limit // ranks) * ranks
    finished: list[Bucket] = []
    segments: list[Segment] = []
    room = limit
    for index, size in sizes:
        start = 0
        while start < size:
            count = min(room, size - start)
            segments.append(Segment(index, start, count))
            start, room = start + count, room - count
            if room == 0:
                finished.append(Bucket(tuple(segments), ranks))
                segments, room = [], limit
    return [*finished, Bucket(tuple(segments), ranks)] if segments else finished


def assign_whole_parameters(sizes: Sequence[tuple[int, int]], loads: list[int], limit: int) -> list[Bucket]:
    """Distribute whole parameters among workers, for updates that need more of a parameter than a run.

    A bucket has one owner. Starting with the largest bucket, each goes to the worker with the fewest elements, as OSS
    distributes parameters.

    Args:
        sizes: (index, elements) of each parameter.
        loads: elements that each worker has so far. The elements of these buckets are added to it.
        limit: elements of a bucket. A larger parameter gets its own bucket. A small model has a lower limit, so that
            each worker gets some parameters.
    """
    limit = min(limit, sum(size for _, size in sizes) // (MIN_BUCKETS_PER_RANK * len(loads)))
    buckets = [
        Bucket(tuple(Segment(sizes[place][0], 0, sizes[place][1]) for place in places), len(loads))
        for places in update_chunks([size for _, size in sizes], limit)
    ]
    owners: dict[Bucket, int] = {}
    for bucket in sorted(buckets, key=lambda bucket: -bucket.length):
        owners[bucket] = loads.index(min(loads))
        loads[owners[bucket]] += bucket.length
    return [replace(bucket, owner=owners[bucket]) for bucket in buckets]


def buckets_by_key(
    members: Mapping[Key, Sequence[tuple[int, int]]],
    limit: int,
    *,
    ranks: Callable[[Key], int],
    whole: bool,
    is_tied: Callable[[Key], bool],
) -> dict[Bucket, Key]:
    """Build buckets that each contain parameters of only one kind.

    Args:
        members: (index, elements) of each parameter, by kind.
        limit: elements of a bucket.
        ranks: returns the number of workers that share the buckets of a kind.
        whole: whether each parameter has a single owner.
        is_tied: whether parameters of a kind have copies in other stages. All copies need the same owner, so the
            other parameters of a stage must not affect the choice.
    """
    buckets: dict[Bucket, Key] = {}
    loads: dict[int, list[int]] = {}
    for key in sorted(members, key=lambda key: not is_tied(key)):
        count = ranks(key)
        so_far = loads.setdefault(count, [0] * count)
        if not whole:
            of_key = split_into_buckets(members[key], count, limit)
        elif is_tied(key):
            alone = [0] * count
            of_key = assign_whole_parameters(members[key], alone, limit)
            so_far[:] = [load + more for load, more in zip(so_far, alone, strict=True)]
        else:
            of_key = assign_whole_parameters(members[key], so_far, limit)
        buckets |= dict.fromkeys(of_key, key)
    return buckets


def update_chunks(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group whole parameters, by index, into chunks of at most ``limit`` elements. Larger ones get their own chunk.

    Args:
        sizes: elements of each parameter.
        limit: elements of a chunk.
    """
    groups: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(place)
        room -= size
    return groups
