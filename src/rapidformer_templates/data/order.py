"""The samples of each step. They depend only on the seed and the step.

The number of workers, the micro batch size, loader processes and resuming do not change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rapidformer_templates.data.random_streams import NewestEpochs, Stream
from rapidformer_templates.data.shapes import Shape

WINDOW = 50
"""Number of global batches that are sorted by length together. More means less padding, fewer means more randomness."""


@dataclass(frozen=True)
class BatchRequest:
    """The samples of one micro batch of one rank.

    Attributes:
        samples: indices into the data set.
        key: seed of random changes to a sample, together with its position.
        positions: the position of each sample in the order (in an evaluation, its index).
        idle: no sample was left for this rank. The batch only keeps it in step with the others.
        shape: the shape that the batch is padded to. None uses its longest row.
        tokens: number of tokens without padding, if a shape is given.
    """

    samples: list[int]
    key: tuple[int, int]
    positions: list[int]
    idle: bool = False
    shape: Shape | None = None
    tokens: int = 0


class Order(Protocol):
    """The interface of an order of training samples, as the loop uses it.

    Attributes:
        seed: seed of everything random in it.
        by_epochs: whether batches end at the end of an epoch.
        steps_per_epoch: optimizer steps of one pass over the data.
    """

    seed: int
    by_epochs: bool
    steps_per_epoch: int

    def epoch(self, step: int) -> float:
        """Return the passes over the data that are complete before ``step``."""

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of the global batch of ``step``. Positions never repeat in a run."""

    def requests(self, step: int, count: int, own_indices: range) -> Iterator[BatchRequest]:
        """Yield the requests of this rank, whose indices among the ``count`` micro batches are ``own_indices``.

        By default, the global batch is split into even pieces. No sample of a short batch is lost or repeated: a piece
        without samples is idle.
        """
        samples, positions = self.step(step)
        for number in own_indices:
            first, end = len(samples) * number // count, len(samples) * (number + 1) // count
            idle = first == end
            piece = slice(0, 1) if idle else slice(first, end)
            yield BatchRequest(samples[piece].tolist(), (self.seed, Stream.SAMPLE), positions[piece].tolist(), idle)

    def depends_on(self) -> dict[str, object]:
        """Return what the samples of a step depend on, as plain values. A resumed run must have the same values."""


class SampleOrder(Order):
    """The order of the training samples.

    Samples are drawn from an endless sequence of positions. Position ``p`` is in epoch ``p // size``, and each epoch is
    a new permutation. By epochs, each epoch is split into batches separately, and its last batch may be shorter. By
    iterations, batches continue across the borders of epochs.

    Args:
        size: number of samples.
        global_batch: samples per step.
        seed: seed of the permutations.
        by_epochs: whether batches end at the end of an epoch.
        lengths: lengths of the samples, to put samples of similar length into one batch. None gives plain random
            batches.
        in_order: the set has its own order, which continues over epochs. Sample ``p`` is at position ``p``.
        identity: a text for everything else that the samples depend on, if the set has one.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        seed: int,
        *,
        by_epochs: bool,
        lengths: np.ndarray | None = None,
        in_order: bool = False,
        identity: str | None = None,
    ) -> None:
        self.size = size
        self.global_batch = global_batch
        self.seed = seed
        self.by_epochs = by_epochs
        self.lengths = lengths
        self.in_order = in_order
        self.identity = identity
        self.steps_per_epoch = math.ceil(size / global_batch)
        self._permutations = NewestEpochs(self._permutation)
        self._window: tuple[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = ((-1, -1), [])

    def epoch(self, step: int) -> float:
        """Return the passes over the data that are complete before ``step``."""
        if self.by_epochs:
            return step / self.steps_per_epoch
        return step * self.global_batch / self.size

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of the global batch of ``step``. Positions never repeat in a run."""
        epoch, index, end = 0, step, None
        if self.by_epochs:
            epoch, index = divmod(step, self.steps_per_epoch)
            end = (epoch + 1) * self.size
        if self.lengths is None:
            return self._span(epoch * self.size + index * self.global_batch, self.global_batch, end)
        # Samples of similar length: a window of positions is sorted by length and then shuffled by batches.
        window, number = divmod(index, WINDOW)
        if self._window[0] != (epoch, window):
            count = WINDOW * self.global_batch
            samples, positions = self._span(epoch * self.size + window * count, count, end)
            by_length = np.argsort(self.lengths[samples], kind="stable")
            batches = [by_length[i : i + self.global_batch] for i in range(0, len(by_length), self.global_batch)]
            shuffled = np.random.default_rng((self.seed, Stream.BATCHES, epoch, window)).permutation(len(batches))
            self._window = ((epoch, window), [(samples[batches[i]], positions[batches[i]]) for i in shuffled])
        return self._window[1][number]

    def depends_on(self) -> dict[str, object]:
        """Return what the samples of a step depend on."""
        return {
            "--seed": self.seed,
            "--global-batch-size": self.global_batch,
            "training samples": self.size,
            "by epochs": self.by_epochs,
            "--group-by-length": self.lengths is not None,
        } | ({"the corpus": self.identity} if self.identity else {})

    def _span(self, start: int, count: int, end: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of ``count`` consecutive positions, or of those before ``end``."""
        stop = start + count if end is None else min(start + count, end)
        positions = np.arange(start, stop)
        if self.in_order:
            return positions, positions
        parts = []
        for epoch in range(start // self.size, (stop - 1) // self.size + 1):  # nearly always one
            first = epoch * self.size
            parts.append(self._permutations[epoch][max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts), positions

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, Stream.ORDER, epoch)).permutation(self.size)
