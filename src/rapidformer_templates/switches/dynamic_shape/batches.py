"""The order of ``--data-iterator dynamic-shape``: how batches are formed by length and grouped into steps."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rapidformer_templates.data.collate import check_pads_to_shape
from rapidformer_templates.data.loader import sample_lengths
from rapidformer_templates.data.order import BatchRequest, NewestEpochs, Stream
from rapidformer_templates.data.shapes import Shape, choose_shapes, count_batches
from rapidformer_templates.data.types import Data, SampleSet
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.dynamic_shape.declaration import MULTIPLE

if TYPE_CHECKING:
    from rapidformer_templates.data.tasks import Task


class DynamicOrder:
    """Batches of a few shapes, in random order. The order depends only on the seed and the step.

    An epoch is a permutation of the samples, sorted by shape and cut into batches. Each epoch draws again which samples
    share a batch, and the order of the batches. Every epoch has the same number of batches of each shape, so that any
    step is found without a look at earlier ones.

    Each epoch is divided into steps as evenly as possible. If a step has one batch less than others, a worker idles. No
    sample is lost or repeated.

    An epoch costs O(samples) when its first step is requested. A step costs O(its samples).

    Args:
        lengths: lengths of the samples in tokens. None is above the longest shape.
        shapes: shapes that batches are padded to, shortest first.
        micro_batches: batches per step, over all workers.
        seed: seed of the permutations.
    """

    def __init__(self, lengths: np.ndarray, shapes: Sequence[Shape], micro_batches: int, seed: int) -> None:
        self.size = len(lengths)
        self.lengths = lengths
        self.shapes = list(shapes)
        self.micro_batches = micro_batches
        self.seed = seed
        kinds = np.searchsorted([shape.length for shape in shapes], lengths)
        self._kinds = kinds.astype(np.min_scalar_type(len(shapes)))  # up to 16 bits are sorted in linear time
        shares = count_batches(shapes, np.bincount(kinds, minlength=len(shapes)).tolist())
        # Each shape has full batches and perhaps one partial batch. All are slices of the sorted samples.
        samples = [n for shape, share in zip(shapes, shares, strict=True) for n in (shape.rows, share.rest)]
        times = [n for share in shares for n in (share.full, share.batches - share.full)]
        self._ends = np.cumsum(np.repeat(samples, times))
        self._shape_of = np.repeat(np.arange(len(shapes)), [share.batches for share in shares])
        self.batches = len(self._ends)
        self.steps_per_epoch = math.ceil(self.batches / micro_batches)
        self._epochs = NewestEpochs(self._draw)

    @property
    def fill(self) -> float:
        """Share of an epoch's tokens that are not padding."""
        tokens = np.array([shape.tokens for shape in self.shapes])
        return float(self.lengths.sum() / tokens[self._shape_of].sum())

    def epoch(self, step: int) -> float:
        """Return the passes over the data that are complete before ``step``."""
        return step / self.steps_per_epoch

    def step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of the batches of ``step``, longest rows first."""
        parts = [self._samples(epoch, batch) for epoch, batch in self._step(step)]
        return np.concatenate([samples for samples, _ in parts]), np.concatenate([positions for _, positions in parts])

    def requests(self, step: int, count: int, own_indices: range) -> Iterator[BatchRequest]:
        """Yield the requests of the batches of a step whose indices are in ``own_indices``.

        Batches are ordered by row length, so workers with neighbouring batches wait little for each other.
        """
        assert count == self.micro_batches
        batches = self._step(step)
        for number in own_indices:
            idle = number >= len(batches)
            epoch, batch = batches[-1 if idle else number]
            samples, positions = self._samples(epoch, batch)
            if idle:
                samples, positions = samples[:1], positions[:1]
            tokens = int(self.lengths[samples].sum())
            shape = self.shapes[self._shape_of[batch]]
            yield BatchRequest(samples.tolist(), (self.seed, Stream.SAMPLE), positions.tolist(), idle, shape, tokens)

    def depends_on(self) -> dict[str, object]:
        """Return everything that the samples of a step depend on."""
        return {
            "--data-iterator": "dynamic-shape",
            "--seed": self.seed,
            "micro batches a step": self.micro_batches,
            "training samples": self.size,
            "by epochs": True,  # older versions had another order for a run that counts iterations
            "shapes": [list(shape) for shape in self.shapes],
            "checksum of the lengths": zlib.crc32(self.lengths.astype(np.int64).tobytes()),
        }

    def _step(self, step: int) -> list[tuple[int, int]]:
        """Return (epoch, batch) for each batch of a step, longest rows first."""
        epoch, index = divmod(step, self.steps_per_epoch)
        first, end = (self.batches * i // self.steps_per_epoch for i in (index, index + 1))
        drawn = [(epoch, int(batch)) for batch in self._epochs[epoch][1][first:end]]
        return sorted(drawn, key=lambda batch: -self._shape_of[batch[1]])

    def _samples(self, epoch: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (sample indices, positions) of a batch."""
        first, end = int(self._ends[batch - 1]) if batch else 0, int(self._ends[batch])
        return self._epochs[epoch][0][first:end], np.arange(first, end) + epoch * self.size

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw (samples sorted by shape, order of the batches) of an epoch."""
        samples = np.random.default_rng((self.seed, Stream.ORDER, epoch)).permutation(self.size)
        by_shape = samples[np.argsort(self._kinds[samples], kind="stable")]
        order = np.random.default_rng((self.seed, Stream.BATCHES, epoch)).permutation(self.batches)
        return by_shape, order


class RunWithData(Protocol):
    """The parts of a run that its shapes depend on."""

    config: RunConfig
    plan: Plan
    data: Data
    task: Task | None


def order_of(run: RunWithData, samples: SampleSet) -> tuple[DynamicOrder, str]:
    """Return the order of a run's training samples, and a line that describes its shapes.

    Raises:
        DataError: the samples cannot be batched by length.
    """
    config, sizes = run.config, run.plan.sizes
    check_pads_to_shape(run.data.collate)
    lengths = sample_lengths(samples, run.data, training=True)
    if lengths is None or len(lengths) != len(samples):
        count = "no" if lengths is None else f"{len(lengths):,}"
        message = f"there are {count} lengths for {len(samples):,} training samples"
        hint = "give the length of each in Data.lengths: build_data()"
        raise DataError(message, where="--data-iterator dynamic-shape", hint=hint)
    options = config.switches["dynamic-shape"]
    longest = run.task.seq_length if run.task else config.model.seq_length or int(lengths.max())
    budget = options.tokens_per_batch or sizes.micro_batch * longest
    shapes = choose_shapes(lengths, budget, options.shape_limit, options.shape_multiple or MULTIPLE)
    order = DynamicOrder(lengths, shapes, sizes.data * sizes.accumulation, config.training.seed)
    shown = ", ".join(f"{shape.rows} × {shape.length}" for shape in shapes[:16]) + (", …" if len(shapes) > 16 else "")
    line = f"shapes     {len(shapes)} (rows × tokens): {shown}; {order.fill:.1%} of the tokens are not padding"
    return order, line
