"""The samples of each step. They depend only on the seed and the step.

The number of workers, the micro batch size, loader processes and resuming do not change them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from rapidformer_templates.data.shapes import Shape

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


WINDOW = 50
"""Number of global batches that are sorted by length together. More means less padding, fewer means more randomness."""

PASSES = "passes over the data"
"""Key of what the order depends on, if it is not the order of older versions: each pass has each sample once."""


def spread(order: np.ndarray, before: Sequence[int], end: int, identity: Callable[[int], int] = int) -> None:
    """Reorder a pass over the data, in place, so that it does not repeat the last samples before it too soon.

    Any ``len(before) + 1`` consecutive samples then are distinct, if the samples before ``end`` allow it.

    Args:
        order: the samples of the pass in random order.
        before: identities of the last samples before the pass.
        end: only samples before this index are exchanged.
        identity: returns the identity of a sample.
    """
    last = {sample: index for index, sample in enumerate(before)}
    for i in range(min(len(before), end)):
        if last.get(identity(order[i]), -1) >= i:
            j = next((j for j in range(i + 1, end) if last.get(identity(order[j]), -1) < i), i)
            order[i], order[j] = order[j], order[i]


class Passes:
    """The samples of each pass over a data set: permutations that depend only on a seed.

    Passes follow one another without a gap. Any ``apart`` consecutive samples are distinct, if there are as many.

    Args:
        size: number of samples.
        seed: seed of the permutations.
        apart: number of consecutive samples that must be distinct. 1 allows all permutations.
    """

    def __init__(self, size: int, seed: tuple[int, ...], apart: int = 1) -> None:
        self.size, self.seed, self.apart = size, seed, apart
        self._drawn = NewestEpochs(self._draw)

    def __getitem__(self, epoch: int) -> np.ndarray:
        return self._drawn[epoch]

    def _draw(self, epoch: int) -> np.ndarray:
        if not 1 < self.apart <= self.size:
            return self._permutation(epoch)
        if self.size < 2 * self.apart:
            return self._permutation(0)  # few samples: one order for all passes
        order = self._permutation(epoch)
        if epoch:
            # The last samples of a pass are never exchanged, so those of the pass before are known without its order.
            before = self._permutation(epoch - 1)[1 - self.apart :].tolist()
            spread(order, before, self.size - self.apart + 1)
        return order

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((*self.seed, epoch)).permutation(self.size)


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
        steps_per_epoch: optimizer steps of one pass over the data.
    """

    seed: int
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


def keep_apart(samples: object, count: int) -> None:
    """Tell a set with its own order that any ``count`` of its consecutive samples are a batch.

    If it has as many samples, none of them may then occur twice. A set without ``keep_apart`` repeats none too soon.
    """
    tell: Callable[[int], None] | None = getattr(samples, "keep_apart", None)
    if tell:
        tell(count)


@dataclass(eq=False)
class SampleOrder(Order):
    """The order of the training samples.

    Samples are drawn from an endless sequence of positions. Position ``p`` is in epoch ``p // size``, and each epoch is
    a new permutation. By epochs, each epoch is split into batches separately, and its last batch may be shorter. By
    iterations, all batches are whole, and one continues across the border of two epochs. No batch holds a sample twice,
    unless there are fewer samples than it has.

    Attributes:
        size: number of samples.
        global_batch: samples per step.
        seed: seed of the permutations.
        by_epochs: whether batches end at the end of an epoch.
        lengths: lengths of the samples, to put samples of similar length into one batch. None gives plain random
            batches.
        in_order: the set has its own order, which continues over epochs. Sample ``p`` is at position ``p``.
        identity: a text for everything else that the samples depend on, if the set has one.
    """

    size: int
    global_batch: int
    seed: int
    _: KW_ONLY
    by_epochs: bool
    lengths: np.ndarray | None = None
    in_order: bool = False
    identity: str | None = None

    def __post_init__(self) -> None:
        self.steps_per_epoch = math.ceil(self.size / self.global_batch)
        self._crosses_borders = not self.by_epochs and self.size % self.global_batch > 0
        self._passes = Passes(self.size, (self.seed, Stream.ORDER), self.global_batch if self._crosses_borders else 1)
        self._window: tuple[int, list[tuple[np.ndarray, np.ndarray]]] = (-1, [])

    def epoch(self, step: int) -> float:
        """Return the passes over the data that are complete before ``step``."""
        if self.by_epochs:
            return step / self.steps_per_epoch
        return step * self.global_batch / self.size

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of the global batch of ``step``. Positions never repeat in a run."""
        size, count = self.size, self.global_batch
        # The batches of an epoch are at the positions from ``first`` to ``end``. A batch across its end comes after.
        if self.by_epochs:
            epoch, index = divmod(step, self.steps_per_epoch)
            first, end = epoch * size, (epoch + 1) * size
        else:
            epoch = step * count // size
            first, end = -(-epoch * size // count) * count, (epoch + 1) * size // count * count
            index = step - first // count
        begin = first + index * count
        stop = min(begin + count, end) if self.by_epochs else begin + count
        if self.lengths is None:
            return self._span(begin, stop)
        # Samples of similar length: a window of positions is sorted by length and then shuffled by batches. A batch
        # across a border is a separate window.
        window, number = divmod(index, WINDOW)
        if begin >= end:
            number = 0
        else:
            begin -= number * count
            stop = min(begin + WINDOW * count, end)
        if self._window[0] != begin:
            samples, positions = self._span(begin, stop)
            by_length = np.argsort(self.lengths[samples], kind="stable")
            batches = [by_length[i : i + count] for i in range(0, len(by_length), count)]
            shuffled = np.random.default_rng((self.seed, Stream.BATCHES, epoch, window)).permutation(len(batches))
            self._window = (begin, [(samples[batches[i]], positions[batches[i]]) for i in shuffled])
        return self._window[1][number]

    def depends_on(self) -> dict[str, object]:
        """Return what the samples of a step depend on."""
        values: dict[str, object] = {
            "--seed": self.seed,
            "--global-batch-size": self.global_batch,
            "training samples": self.size,
            "by epochs": self.by_epochs,
            "--group-by-length": self.lengths is not None,
        }
        if self.identity:
            values["the corpus"] = self.identity
        if not self.by_epochs and not self.in_order and (self._crosses_borders or self.lengths is not None):
            values[PASSES] = "whole"
        return values

    def _span(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of consecutive positions."""
        positions = np.arange(start, stop)
        if self.in_order:
            return positions, positions
        parts = []
        for epoch in range(start // self.size, (stop - 1) // self.size + 1):  # nearly always one
            first = epoch * self.size
            parts.append(self._passes[epoch][max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts), positions
