"""The tokens of a sequence that each worker has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenIntervals:
    """A sequence divided into intervals of equal length. The last ones may be shorter.

    Each worker has one interval, or one from each end of the sequence.

    Attributes:
        length: number of tokens in the sequence.
        workers: number of workers that share it.
        folded: whether a worker has two intervals. With four workers, the first has intervals 0 and 7, the second 1 and
            6.
    """

    length: int
    workers: int
    folded: bool

    @property
    def step(self) -> int:
        """Number of tokens in an interval."""
        return -(-self.length // (self.workers * (2 if self.folded else 1)))

    @property
    def shard_length(self) -> int:
        """Number of tokens on each worker, with padding."""
        return self.step * (2 if self.folded else 1)

    def of(self, rank: int) -> list[tuple[int, tuple[int, int]]]:
        """Return the intervals of a worker: each offset in the worker's part, and (begin, end) in the sequence."""
        numbers = (rank, 2 * self.workers - 1 - rank) if self.folded else (rank,)
        bounds = (range(number * self.step, (number + 1) * self.step) for number in numbers)
        return [
            (place * self.step, (min(bound.start, self.length), min(bound.stop, self.length)))
            for place, bound in enumerate(bounds)
        ]

    @property
    def positions(self) -> list[int]:
        """The index of each token in the concatenated parts of all workers."""
        positions = [0] * self.length
        for rank in range(self.workers):
            for place, (begin, end) in self.of(rank):
                first = rank * self.shard_length + place
                positions[begin:end] = range(first, first + end - begin)
        return positions
