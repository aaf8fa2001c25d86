"""Windows over parameters laid end to end: what is reduced at a time, and who updates which run of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from rapidformer_templates.planning.deepspeed_file.buckets import LEAST

Kind = TypeVar("Kind", bound=Hashable)

MOST = 2**23
"""Elements of the largest window: 32 MB in fp32, enough to keep a link busy."""

WINDOWS_EACH = 4
"""Windows of whole parameters that each worker has at least, as far as parameters are small enough: for even shares."""


def window_for(width: int) -> int:
    """Elements of a window: in a square block one matrix, as in a bucket of ZeRO; so it is little beside a model.

    Args:
        width: of the model.
    """
    return min(max(width * width, LEAST), MOST)


class Segment(NamedTuple):
    """A run of a flattened parameter.

    Attributes:
        parameter: its place among the parameters.
        start: first element of the run.
        length: elements of the run.
    """

    parameter: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Window:
    """Runs of consecutive parameters, laid end to end.

    Attributes:
        segments: the runs in their order.
        ranks: workers that share it; each updates one of as many equal shares, the last of them padded.
        owner: the one of them that updates all of it, whose share it is; None where it is shared.
    """

    segments: tuple[Segment, ...]
    ranks: int
    owner: int | None = None

    @cached_property
    def length(self) -> int:
        """Elements in it."""
        return sum(segment.length for segment in self.segments)

    @property
    def share(self) -> int:
        """Elements of the share of each rank that has one, with padding."""
        return self.length if self.owner is not None else -(-self.length // self.ranks)

    @property
    def packed(self) -> int:
        """Elements that travel: all shares."""
        return self.share if self.owner is not None else self.share * self.ranks

    def share_of(self, rank: int) -> int:
        """Elements of a rank's share, with padding."""
        return self.share if self.owner in (None, rank) else 0

    def with_offsets(self) -> Iterator[tuple[Segment, int]]:
        """The runs with their offsets in the window."""
        offset = 0
        for segment in self.segments:
            yield segment, offset
            offset += segment.length

    def owned(self, rank: int) -> Iterator[tuple[Segment, int]]:
        """The runs in a rank's share, each with its offset in the share."""
        place = rank if self.owner is None else 0 if rank == self.owner else 1
        begin, end = place * self.share, (place + 1) * self.share
        for (index, start, count), offset in self.with_offsets():
            low, high = max(begin, offset), min(end, offset + count)
            if low < high:
                yield Segment(index, start + low - offset, high - low), low - begin


def windows(sizes: Sequence[tuple[int, int]], ranks: int, limit: int) -> list[Window]:
    """Divide parameters, laid end to end, into windows.

    Args:
        sizes: (index, elements) of each parameter.
        ranks: workers that share each window.
        limit: elements of a window; a multiple of ``ranks`` is taken, so that only the last one is padded.
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
    """Share out whole parameters among workers, for updates that need more of a parameter than a run.

    A window has one owner: of the windows, the largest first, each goes to whoever has fewest elements, as OSS shares
    out parameters.

    Args:
        sizes: (index, elements) of each parameter.
        loads: elements that each worker has so far; those of these windows are added.
        limit: elements of a window; a larger parameter has its own. In a small model it is less, so that each worker
            has some.
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
    """The windows of parameters that may lie together only with those of their kind.

    Args:
        members: (index, elements) of each parameter, by kind.
        limit: elements of a window.
        ranks: of a kind, the workers that share each window.
        whole: whether parameters are shared out whole.
        is_tied: whether those of a kind have copies in other stages, all of which must have the same owner: what else a
            stage has plays no part in who it is.
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
    """Share out whole parameters, by their places, among turns of at most ``limit`` elements; a larger one has its own.

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
