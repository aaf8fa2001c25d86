"""Dynamic shapes: the few padded lengths that samples are batched in, and the number of batches for each.

A shape is a number of rows times a length. The rows fill a token budget. More lengths mean less padding. But a compiler
needs a graph for each shape, so their number is limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rapidformer_templates.errors import DataError


class Shape(NamedTuple):
    """The shape of a batch: its rows, and the number of tokens that each is padded to."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class ShapeUsage(NamedTuple):
    """How often an epoch uses a shape: its full batches, and the samples of a last batch that is not full."""

    full: int
    rest: int

    @property
    def batches(self) -> int:
        return self.full + (self.rest > 0)


def choose_shapes(lengths: np.ndarray, budget: int, max_shapes: int, multiple: int = 1) -> list[Shape]:
    """Choose the shapes that minimize the padding of these samples, shortest first.

    Dynamic programming over the distinct lengths takes O(shapes × distinct²). It is exact for the padding
    inside rows. Short last batches add padding, which matters for small data sets. So the best choices of 1, 2, …
    ``max_shapes`` lengths are compared by their total number of tokens.

    Args:
        lengths: lengths of the samples in tokens, shape (samples,).
        budget: maximum tokens of a batch, including padding.
        max_shapes: maximum number of shapes. 0 means no limit.
        multiple: padded lengths are multiples of this, but never longer than the longest sample.

    Raises:
        DataError: a sample is longer than the budget.
    """
    longest = int(lengths.argmax())
    if lengths[longest] > budget:
        raise DataError(
            f"training sample {longest} has {lengths[longest]:,} tokens, a batch of --tokens-per-batch only {budget:,}",
            where="--data-iterator dynamic-shape",
            hint="raise --tokens-per-batch or --micro-batch-size, or cut the samples with --seq-length",
        )
    counts = np.bincount(padded_lengths(lengths, multiple))
    distinct = np.flatnonzero(counts)
    if max_shapes == 0 or max_shapes >= len(distinct):
        return _shapes(distinct, budget)
    candidates = [_shapes(distinct[ends - 1], budget) for ends in least_padding(distinct, counts[distinct], max_shapes)]
    return min(candidates, key=lambda shapes: padded_tokens(shapes, count_batches(shapes, per_shape(shapes, counts))))


def padded_lengths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Round lengths up to a multiple, but not beyond the longest. An empty sample has one token of padding."""
    rounded = -(-np.maximum(lengths, 1) // multiple) * multiple
    return np.minimum(rounded, max(1, int(lengths.max())))


def _shapes(lengths: np.ndarray, budget: int) -> list[Shape]:
    return [Shape(budget // length, length) for length in lengths.tolist()]


def per_shape(shapes: Sequence[Shape], counts: np.ndarray) -> list[int]:
    """Return how many samples belong to each shape. A sample belongs to the shortest shape that fits.

    Args:
        counts: number of samples of each length, by length.
    """
    borders = [0, *(shape.length + 1 for shape in shapes)]
    return np.add.reduceat(counts, borders[:-1]).tolist()


def count_batches(shapes: Sequence[Shape], counts: Sequence[int]) -> list[ShapeUsage]:
    """Return how many batches of each shape are needed for ``counts`` samples.

    Samples that do not fill a batch of their shape go into the next longer shape, or into a separate batch that is not
    full. The choice with less padding is taken.
    """
    shares, carried = [], 0
    for k, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        full, rest = divmod(count + carried, shape.rows)
        more = shapes[k + 1].length - shape.length if k + 1 < len(shapes) else shape.tokens
        carried = rest if rest * more < (shape.rows - rest) * shape.length else 0
        shares.append(ShapeUsage(full, rest - carried))
    return shares


def padded_tokens(shapes: Sequence[Shape], shares: Sequence[ShapeUsage]) -> int:
    """Return the tokens of an epoch's batches, including padding."""
    return sum(shape.tokens * share.batches for shape, share in zip(shapes, shares, strict=True))


def least_padding(lengths: np.ndarray, counts: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the groups of distinct lengths that minimize padding, for 1, 2, … ``most`` shapes.

    A group is padded to its last length. With C the samples of the first p lengths, the cost of the first p lengths in
    k groups is ``cost_k[p] = min over q < p of cost_(k-1)[q] + (C[p] - C[q]) × length[p - 1]``.

    Returns:
        For each number of groups, the ends p of its groups in rising order. The last end is the number of lengths.
    """
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = before[1:] * lengths
    origins = [np.zeros(len(lengths), np.int64)]
    for _ in range(1, most):
        cost = np.concatenate([[0], cost])
        best = [np.argmin(cost[:end] - before[:end] * length) for end, length in enumerate(lengths, start=1)]
        origin = np.array(best)
        origins.append(origin)
        cost = cost[origin] + (before[1:] - before[origin]) * lengths
    groups = []
    for k in range(most):
        # Walk back from the last length, without empty groups.
        end, ends = len(lengths), []
        for origin in reversed(origins[: k + 1]):
            if end:
                ends.append(end)
                end = int(origin[end - 1])
        groups.append(np.array(ends[::-1]))
    return groups
