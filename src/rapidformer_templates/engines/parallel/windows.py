"""Windows (buckets) of parameters packed end to end: the unit of a reduction, and which rank updates which run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from rapidformer_templates.planning.deepspeed_file.buckets import LEAST

Kind = TypeVar("Kind", bound=Hashable)

MOST = 2**23
"""Elements of the largest window: 32 MB in fp32, enough to saturate a link."""

WINDOWS_EACH = 4
"""Minimum number of whole-parameter windows per worker, if parameters are small enough. It balances the shares."""


def window_for(width: int) -> int:
    """Return the elements of a window: one matrix of a square block, like a ZeRO bucket. Small compared with a model.

    Args:
        width: hidden size of the model.
    """
    return min(max(width * width, LEAST), MOST)


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
class Window:
    """Runs of consecutive parameters, packed end to end.

    Attributes:
        segments: the runs in their order.
        ranks: number of workers that share it. Each updates one of ``ranks`` equal shares. The last one is padded.
        owner: the rank that updates the whole window. None if the ranks share it.
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
        """Yield the runs with their offsets in the window."""
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


def windows(sizes: Sequence[tuple[int, int]], ranks: int, limit: int) -> list[Window]:
    """Divide parameters, packed end to end, into windows.

    Args:
        sizes: (index, elements) of each parameter.
        ranks: number of workers that share each window.
        limit: elements of a window, rounded down to a multiple of ``ranks``, so that only the last one is padded.
    """
    limit = max(1, limit // ranks) * ranks
    finished: list[Window] = []
    segments: list[Segment] = []
    room = limit
    for index, size in sizes:
        start = 0
        while start < size:
            count = min(room, size - start)
            segments.append(Segment(index, start, count))
            start, room = start + count, room - count
            if room == 0:
                finished.append(Window(tuple(segments), ranks))
                segments, room = [], limit
    return [*finished, Window(tuple(segments), ranks)] if segments else finished


def whole_windows(sizes: Sequence[tuple[int, int]], loads: list[int], limit: int) -> list[Window]:
    """Distribute whole parameters among workers, for updates that need more of a parameter than a run.

    A window has one owner. Starting with the largest window, each goes to the worker with the fewest elements, as OSS
    distributes parameters.

    Args:
        sizes: (index, elements) of each parameter.
        loads: elements that each worker has so far. The elements of these windows are added to it.
        limit: elements of a window. A larger parameter gets its own window. A small model has a lower limit, so that
            each worker gets some parameters.
    """
    limit = min(limit, sum(size for _, size in sizes) // (WINDOWS_EACH * len(loads)))
    found = [
        Window(tuple(Segment(sizes[place][0], 0, sizes[place][1]) for place in places), len(loads))
        for places in turns([size for _, size in sizes], limit)
    ]
    owners: dict[Window, int] = {}
    for window in sorted(found, key=lambda window: -window.length):
        owners[window] = loads.index(min(loads))
        loads[owners[window]] += window.length
    return [replace(window, owner=owners[window]) for window in found]


def windows_of_kinds(
    members: Mapping[Kind, Sequence[tuple[int, int]]],
    limit: int,
    *,
    ranks: Callable[[Kind], int],
    whole: bool,
    is_tied: Callable[[Kind], bool],
) -> dict[Window, Kind]:
    """Build windows that each contain parameters of only one kind.

    Args:
        members: (index, elements) of each parameter, by kind.
        limit: elements of a window.
        ranks: returns the number of workers that share the windows of a kind.
        whole: whether each parameter has a single owner.
        is_tied: whether parameters of a kind have copies in other stages. All copies need the same owner, so the
            other parameters of a stage must not affect the choice.
    """
    found: dict[Window, Kind] = {}
    loads: dict[int, list[int]] = {}
    for kind in sorted(members, key=lambda kind: not is_tied(kind)):
        count = ranks(kind)
        so_far = loads.setdefault(count, [0] * count)
        if not whole:
            mine = windows(members[kind], count, limit)
        elif is_tied(kind):
            alone = [0] * count
            mine = whole_windows(members[kind], alone, limit)
            so_far[:] = [load + more for load, more in zip(so_far, alone, strict=True)]
        else:
            mine = whole_windows(members[kind], so_far, limit)
        found |= dict.fromkeys(mine, kind)
    return found


def turns(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group whole parameters, by index, into turns of at most ``limit`` elements. Larger ones get their own turn.

    Args:
        sizes: elements of each parameter.
        limit: elements of a turn.
    """
    found: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(place)
        room -= size
    return found
