"""Dynamic shapes: the few padded lengths that samples are batched in, and how many batches each takes.

A shape is a number of rows times a length, as many rows as a token budget holds. The more lengths,
the less padding; but each shape is a graph of its own to a compiler, so their number has a cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rapidformer_templates.errors import DataError


class Shape(NamedTuple):
    """The shape of a batch: rows and the tokens that each is padded to."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class Share(NamedTuple):
    """How often a shape is used in an epoch: full batches, and the samples of a last batch that is not full."""

    full: int
    rest: int

    @property
    def batches(self) -> int:
        return self.full + (self.rest > 0)


def choose_shapes(lengths: np.ndarray, budget: int, max_shapes: int, multiple: int = 1) -> list[Shape]:
    """The shapes that pad these samples least, shortest first.

    Lengths are chosen by dynamic programming over the distinct lengths, in O(shapes × distinct × log
    distinct): exact for the padding within the rows. Short last batches add to it, which matters
    where data are few: of the best choices of 1, 2, … ``max_shapes`` lengths, the one with the
    fewest tokens in all is taken.

    Args:
        lengths: of the samples, tokens; shape (samples,).
        budget: most tokens of a batch, padding included.
        max_shapes: most shapes; 0 is no limit.
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
    return min(candidates, key=lambda shapes: padded_tokens(shapes, share_out(shapes, per_shape(shapes, counts))))


def padded_lengths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple, but not beyond the longest; an empty sample is one token of padding."""
    rounded = -(-np.maximum(lengths, 1) // multiple) * multiple
    return np.minimum(rounded, max(1, int(lengths.max())))


def _shapes(lengths: np.ndarray, budget: int) -> list[Shape]:
    return [Shape(budget // length, length) for length in lengths.tolist()]


def per_shape(shapes: Sequence[Shape], counts: np.ndarray) -> list[int]:
    """How many samples belong to each shape, the shortest that holds them.

    Args:
        counts: number of samples of each length, by length.
    """
    borders = [0, *(shape.length + 1 for shape in shapes)]
    return np.add.reduceat(counts, borders[:-1]).tolist()


def share_out(shapes: Sequence[Shape], counts: Sequence[int]) -> list[Share]:
    """How many batches of each shape hold ``counts`` samples.

    What is left of a shape after its full batches goes into the next longer shape, or into a batch
    of its own that is not full, whichever pads less.
    """
    shares, carried = [], 0
    for k, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        full, rest = divmod(count + carried, shape.rows)
        more = shapes[k + 1].length - shape.length if k + 1 < len(shapes) else shape.tokens
        carried = rest if rest * more < (shape.rows - rest) * shape.length else 0
        shares.append(Share(full, rest - carried))
    return shares


def padded_tokens(shapes: Sequence[Shape], shares: Sequence[Share]) -> int:
    """Tokens of an epoch's batches, padding included."""
    return sum(shape.tokens * share.batches for shape, share in zip(shapes, shares, strict=True))


def least_padding(lengths: np.ndarray, counts: np.ndarray, most: int) -> list[np.ndarray]:
    """For 1, 2, … ``most`` shapes, the ends of the groups of distinct lengths that pad least.

    A group is padded to its last length. With C the samples of the first p lengths, the cost of the
    first p lengths in k groups is ``cost_k[p] = min over q < p of cost_(k-1)[q] + (C[p] - C[q]) × length[p - 1]``.

    Returns:
        For each number of groups the ends p of its groups, rising to the number of lengths.
    """
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = before[1:] * lengths
    origins = [np.zeros(len(lengths), np.int64)]
    for _ in range(1, most):
        origin = _origins(np.concatenate([[0], cost]), before, lengths)
        origins.append(origin)
        cost = np.concatenate([[0], cost])[origin] + (before[1:] - before[origin]) * lengths
    return [_walk_back(origins[: k + 1]) for k in range(most)]


def _origins(cost: np.ndarray, before: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each end p = 1, 2, … the q < p with the least ``cost[q] - before[q] × length[p - 1]``.

    The best q never falls as p grows. So the middle end is solved first and bounds its neighbours
    on both sides; all ends of one depth of this halving are solved together.
    """
    size = len(lengths)
    # Of ends not solved yet, those of the nearest solved neighbours bound the q.
    best = np.zeros(size + 2, np.int64)
    best[size + 1] = size
    step = 1 << size.bit_length()
    while step > 1:
        half = step // 2
        ends = np.arange(half, size + 1, step)
        low = best[ends - half]
        high = np.minimum(best[np.minimum(ends + half, size + 1)], ends - 1)
        widths = high - low + 1
        starts = np.cumsum(widths) - widths
        q = np.arange(int(widths.sum())) + np.repeat(low - starts, widths)
        values = cost[q] - before[q] * np.repeat(lengths[ends - 1], widths)
        least = np.minimum.reduceat(values, starts)
        first = np.flatnonzero(values == np.repeat(least, widths))
        best[ends] = q[first[np.searchsorted(first, starts)]]
        step = half
    return best[1:-1]


def _walk_back(origins: Sequence[np.ndarray]) -> np.ndarray:
    """The ends of the groups that led to the last length; groups without a length are left out."""
    end, ends = len(origins[0]), []
    for origin in reversed(origins):
        if end:
            ends.append(end)
            end = int(origin[end - 1])
    return np.array(ends[::-1])
