"""Streams of random numbers for the data, and results that are drawn once per epoch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Stream(enum.IntEnum):
    """The second number of a seed ``(seed, stream, …)``. Streams are independent of each other.

    A resumed run must draw the same numbers, so these values never change.
    """

    ORDER = 0
    """Permutations of the samples, per epoch."""
    BATCHES = 1
    """The order of batches that are grouped by length."""
    SAMPLE = 2
    """Random changes of a training sample."""
    EVALUATION = 3
    """Random changes of an evaluation sample."""
    PACKED_TRAINING = 4
    """Assignment of samples to packed rows."""
    PACKED_VALIDATION = 5
    DOCUMENTS = 7
    """Which pieces of documents are split in two, and where."""
    TRIAL = 8
    """Changes of the sample with which a switch tries the loss."""
    NOISE = 9
    """Noise on the embeddings of a training sample."""
    SHARDS = 10
    """The order of the files of a stream, per epoch."""
    BLOCKS = 11
    """The order of the rows and the samples in a block of a stream."""
    MIXED = 12
    """The order of a set in a mixture, per epoch."""
    PAIR_SAMPLES = 18
    PAIR_CHUNKS = 19
    PAIR_ORDERS = 20
    FORWARD = 21
    """Random numbers in the forward of a micro batch with ``--min-workers``, such as the masks of dropout."""


class NewestEpochs(Generic[T]):
    """Results of a method that draws them for an epoch, such as the order of its samples.

    A batch needs one epoch, or two at a border. So the results of an epoch are dropped when the next but one begins.

    Args:
        draw: maps the number of an epoch to its result.
    """

    def __init__(self, draw: Callable[[int], T]) -> None:
        self._draw = draw
        self._drawn: dict[int, T] = {}

    def __getitem__(self, epoch: int) -> T:
        if epoch not in self._drawn:
            self._drawn = {old: drawn for old, drawn in self._drawn.items() if old >= epoch - 1}
            self._drawn[epoch] = self._draw(epoch)
        return self._drawn[epoch]

    def __getstate__(self) -> dict[str, object]:
        return {"_draw": self._draw, "_drawn": {}}  # loader processes draw again: tables would be sent as copies
