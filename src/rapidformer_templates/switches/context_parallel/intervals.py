"""Which tokens of a sequence each worker has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Intervals:
    """A sequence in intervals of one length, the last ones shorter; each worker has one, or one from each end.

    Attributes:
        length: tokens of the sequence.
        workers: that share it.
        folded: whether a worker has two: of four workers the first has numbers 0 and 7, the second 1 and 6.
    """

    length: int
    workers: int
    folded: bool

    @property
    def step(self) -> int:
        """Tokens of an interval."""
        return -(-self.length // (self.workers * (2 if self.folded else 1)))

    @property
    def stretch(self) -> int:
        """Tokens that each worker holds, with those that fill it up."""
        return self.step * (2 if self.folded else 1)

    def of(self, rank: int) -> list[tuple[int, tuple[int, int]]]:
        """The intervals of a worker: where each begins in its stretch, and (begin, end) in the sequence."""
        numbers = (rank, 2 * self.workers - 1 - rank) if self.folded else (rank,)
        bounds = (range(number * self.step, (number + 1) * self.step) for number in numbers)
        return [
            (place * self.step, (min(bound.start, self.length), min(bound.stop, self.length)))
            for place, bound in enumerate(bounds)
        ]

    @property
    def positions(self) -> list[int]:
        """Where each token lies in the stretches of all workers, laid end to end."""
        found = [0] * self.length
        for rank in range(self.workers):
            for place, (begin, end) in self.of(rank):
                first = rank * self.stretch + place
                found[begin:end] = range(first, first + end - begin)
        return found
