"""Windows over parameters laid end to end: what is reduced at a time, and who updates which run of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rapidformer_templates.planning.deepspeed_file.buckets import LEAST

MOST = 2**23
"""Elements of the largest window: 32 MB in fp32, enough to keep a link busy."""


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
    """

    segments: tuple[Segment, ...]
    ranks: int

    @property
    def length(self) -> int:
        """Elements in it."""
        return sum(segment.length for segment in self.segments)

    @property
    def share(self) -> int:
        """Elements of each rank's share, with padding."""
        return -(-self.length // self.ranks)

    def with_offsets(self) -> Iterator[tuple[Segment, int]]:
        """The runs with their offsets in the window."""
        offset = 0
        for segment in self.segments:
            yield segment, offset
            offset += segment.length

    def owned(self, rank: int) -> Iterator[tuple[Segment, int]]:
        """The runs in a rank's share, each with its offset in the share."""
        begin, end = rank * self.share, (rank + 1) * self.share
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
