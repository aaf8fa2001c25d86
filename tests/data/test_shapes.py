"""The choice of shapes compared with brute force, and the division of samples into batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.shapes import (
    Shape,
    ShapeUsage,
    choose_shapes,
    count_batches,
    least_padding,
    padded_lengths,
    padded_tokens,
    per_shape,
)
from rapidformer_templates.errors import DataError

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def _choices(distinct: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return every set of up to ``most`` lengths that contains the longest."""
    sizes = range(min(most, len(distinct)))
    return [(*chosen, distinct[-1]) for size in sizes for chosen in itertools.combinations(distinct[:-1], size)]


def _tokens_of_an_epoch(lengths: np.ndarray, chosen: Sequence[int], budget: int) -> int:
    shapes = [Shape(budget // length, length) for length in chosen]
    return padded_tokens(shapes, count_batches(shapes, per_shape(shapes, np.bincount(lengths))))


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1, max_size=11, unique=True), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_padding_is_the_least_that_any_choice_has(distinct: list[int], most: int, seed: int) -> None:
    lengths = np.sort(distinct)
    counts = np.random.default_rng(seed).integers(1, 50, len(lengths))

    def padded(chosen: Sequence[int]) -> int:
        nearest = (min(c for c in chosen if c >= length) for length in lengths.tolist())
        return sum(int(count) * length for count, length in zip(counts, nearest, strict=True))

    for groups, ends in enumerate(least_padding(lengths, counts, most), 1):
        assert len(ends) <= groups
        best = min(padded(chosen) for chosen in _choices(lengths.tolist(), groups))
        assert padded(lengths[ends - 1].tolist()) == best


@pytest.mark.parametrize("seed", range(40))
def test_tokens_of_an_epoch_are_within_five_percent_of_brute_force(seed: int) -> None:
    """The count includes short last batches and samples that were moved to a longer shape."""
    draw = np.random.default_rng(seed)
    distinct = np.sort(draw.choice(np.arange(1, 60), 10, replace=False))
    lengths = draw.choice(distinct, 500, p=draw.dirichlet(np.ones(10)))
    budget, most = int(lengths.max() * draw.integers(1, 9)), int(draw.integers(1, 5))
    shapes = choose_shapes(lengths, budget, most)
    found = _tokens_of_an_epoch(lengths, [shape.length for shape in shapes], budget)
    best = min(_tokens_of_an_epoch(lengths, chosen, budget) for chosen in _choices(np.unique(lengths).tolist(), most))
    assert best <= found <= 1.05 * best


@given(LENGTHS, st.integers(1, 6), st.integers(0, 6), st.sampled_from([1, 4, 8]))
@settings(max_examples=150, deadline=None)
def test_every_sample_has_a_shape_under_the_budget(lengths: list[int], rows: int, most: int, multiple: int) -> None:
    samples = np.array(lengths)
    budget = max(1, rows * max(lengths))
    shapes = choose_shapes(samples, budget, most, multiple)
    assert len(shapes) <= (most or len(set(lengths)))
    assert shapes == sorted(shapes, key=lambda shape: shape.length)
    assert all(shape.rows == budget // shape.length for shape in shapes)
    assert all(shape.length % multiple == 0 or shape.length == max(1, *lengths) for shape in shapes)
    shares = count_batches(shapes, per_shape(shapes, np.bincount(padded_lengths(samples, multiple))))
    assert sum(shape.rows * share.full + share.rest for shape, share in zip(shapes, shares, strict=True)) == len(
        lengths
    )
    assert all(0 <= share.rest < shape.rows for shape, share in zip(shapes, shares, strict=True))


def test_what_is_left_of_a_shape_goes_where_it_pads_less() -> None:
    shapes = [Shape(10, 8), Shape(8, 10), Shape(1, 80)]
    # Padding three samples by 2 tokens more is cheaper than seven empty rows of 8. Padding three by 70 more is not.
    assert count_batches(shapes, [13, 0, 0]) == [ShapeUsage(1, 0), ShapeUsage(0, 3), ShapeUsage(0, 0)]
    assert count_batches(shapes, [13, 5, 2]) == [ShapeUsage(1, 0), ShapeUsage(1, 0), ShapeUsage(2, 0)]
    # Nine samples almost fill a batch.
    assert count_batches(shapes, [9, 8, 0]) == [ShapeUsage(0, 9), ShapeUsage(1, 0), ShapeUsage(0, 0)]


def test_without_a_cap_hardly_anything_is_padding() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(4.2, 0.9, 20_000).astype(np.int64) + 1, 512)
    counts = np.bincount(lengths)
    fills = []
    for most in (1, 2, 4, 8, 16, 0):
        shapes = choose_shapes(lengths, 8192, most)
        fills.append(lengths.sum() / padded_tokens(shapes, count_batches(shapes, per_shape(shapes, counts))))
    assert fills == sorted(fills)
    assert fills[0] == pytest.approx(lengths.sum() / (1250 * 16 * 512))
    assert fills[0] < 0.25 < 0.8 < fills[3]
    assert fills[-1] > 0.99


def test_choosing_is_fast() -> None:
    """A second is generous. The test detects quadratic work, which takes several seconds."""
    lengths = np.random.default_rng(0).integers(1, 8193, 200_000)
    began = time.process_time()
    assert len(choose_shapes(lengths, 65_536, 16)) == 16
    assert time.process_time() - began < 1


def test_a_sample_beyond_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"training sample 2 has 101 tokens, a batch .* only 100"):
        choose_shapes(np.array([3, 100, 101]), 100, 8)


def test_rounding_stops_at_the_longest() -> None:
    """A model with 100 positions cannot take 104."""
    assert padded_lengths(np.array([0, 1, 8, 9, 97, 100]), 8).tolist() == [8, 8, 8, 16, 100, 100]
    assert padded_lengths(np.array([0, 0]), 8).tolist() == [1, 1]
