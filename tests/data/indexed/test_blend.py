"""Blends are exact to within one sample, after any number of samples and everywhere in the run."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.indexed.blend import LONGEST_PERIOD, Blend, quota_order, whole_weights
from rapidformer_templates.data.indexed.cache import IndexCache
from rapidformer_templates.data.pretraining.windows import GPTSamples
from rapidformer_templates.errors import DataError
from tests.support.indexed_sets import numbered


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_every_prefix_is_exact_within_one_sample(weights: list[int]) -> None:
    order = quota_order(weights)
    total = sum(weights)
    counts = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, total + 1)[:, None] * np.asarray(weights) / total
    assert (np.abs(counts - shares) < 1 - 1e-9).all()
    assert counts[-1].tolist() == weights


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights(["0.3", "0.7"]) == [3, 7]
    assert whole_weights(["2", "1", "1"]) == [2, 1, 1]
    assert whole_weights([10, 20]) == [1, 2]
    assert whole_weights(["1e-1", "0.9"]) == [1, 9]
    odd = ["123456789", "987654321", "1"]
    rounded = whole_weights(odd)
    assert abs(sum(rounded) - LONGEST_PERIOD) <= len(odd)
    shares = np.asarray(rounded) / sum(rounded) - np.asarray(odd, float) / sum(map(float, odd))
    assert (np.abs(shares) < 2 / LONGEST_PERIOD).all()
    for wrong in (["a", "1"], ["0", "1"], ["-1", "2"], [], ["nan", "1"], ["inf", "1"]):
        with pytest.raises(DataError, match="these are not weights"):
            whole_weights(wrong)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_each_set_is_walked_through_in_its_order(sets: list[tuple[int, int]], start: int) -> None:
    class Endless(list[int]):
        def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
            return place

    blend = Blend([Endless([0] * size) for size, _ in sets], [weight for _, weight in sets])
    assert len(blend) == sum(size for size, _ in sets)
    sources, places = blend.origin(np.arange(start + 50))
    for i in range(len(sets)):
        assert places[sources == i].tolist() == list(range(int((sources == i).sum())))
    assert blend.__getitems__(list(range(start, start + 50))) == places[start:].tolist()


def test_an_evaluation_repeats_nothing(tmp_path: Path) -> None:
    sets = [
        GPTSamples(numbered(tmp_path / name, [50], first), (0, 1), 5, 1, overlap=0)
        for name, first in (("a", 0), ("b", 100), ("c", 200))
    ]
    for weights in (["0.5", "0.3", "0.2"], [1, 1, 1], [7, 1, 2]):
        blend = Blend(sets, weights, repeats=False)
        drawn = [int(blend[p]["input_ids"][0]) for p in range(len(blend))]
        assert len(set(drawn)) == len(drawn)
        sources, places = blend.origin(np.asarray([len(blend)]))
        assert places[0] == len(sets[sources[0]])  # one more would be a repetition
    assert len(Blend(sets, [10, 10, 10], repeats=False)) == 30


def test_a_blend_travels_without_its_tables(tmp_path: Path) -> None:
    sets = [GPTSamples(numbered(tmp_path / name, [500]), (0, 1), 5, 1) for name in "ab"]
    blend = Blend(sets, ["0.123", "0.877"], cache=IndexCache(tmp_path / "cache"))
    drawn = [item["input_ids"].tolist() for item in blend.__getitems__(range(100))]
    packed = pickle.dumps(blend)
    assert len(packed) < 2000
    assert [item["input_ids"].tolist() for item in pickle.loads(packed).__getitems__(range(100))] == drawn
