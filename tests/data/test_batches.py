"""Batches: the order of their samples, their shapes, their padding, and the processes that load them."""

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset
from transformers import AutoTokenizer

from rapidformer_templates.data.collate import IGNORED, CausalCollate, PadCollate, Ragged, TokenizedSamples, pad_rows
from rapidformer_templates.data.loader import eval_requests, load, train_requests
from rapidformer_templates.data.order import BatchRequest, SampleOrder
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
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import DataError
from tests.support.messages import Says

SIZES = st.integers(1, 60)
BATCHES = st.integers(1, 16)


def _requests(order: SampleOrder, steps: range, data_size: int, accumulation: int) -> list[list[BatchRequest]]:
    """Return, for each step, the requests of all ranks, micro batch by micro batch."""
    ranks = [
        list(train_requests(order, steps.start, steps.stop, rank=rank, data_size=data_size, accumulation=accumulation))
        for rank in range(data_size)
    ]
    return [
        [ranks[rank][i * accumulation + micro] for micro in range(accumulation) for rank in range(data_size)]
        for i in range(len(steps))
    ]


@given(SIZES, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_ranks_and_micro_batches_share_the_step(
    size: int, micro: int, data_size: int, accumulation: int, grouped: bool, by_epochs: bool
) -> None:
    lengths = np.random.default_rng(2).integers(1, 9, size) if grouped else None

    def order() -> SampleOrder:
        return SampleOrder(size, micro * data_size * accumulation, 5, by_epochs=by_epochs, lengths=lengths)

    whole = order()
    for step, requests in enumerate(_requests(order(), range(7), data_size, accumulation)):
        shared = [sample for request in requests if not request.idle for sample in request.samples]
        assert shared == whole.step(step)[0].tolist()
        assert all(len(request.samples) <= micro for request in requests)
        assert all(len(request.samples) == len(request.positions) for request in requests)


@given(SIZES, BATCHES, st.booleans(), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_seeking_gives_the_same_step_as_walking(size: int, batch: int, grouped: bool, step: int) -> None:
    lengths = np.random.default_rng(3).integers(1, 9, size) if grouped else None
    walked = SampleOrder(size, batch, 5, by_epochs=False, lengths=lengths)
    for earlier in range(step):
        walked.step(earlier)
    sought = SampleOrder(size, batch, 5, by_epochs=False, lengths=lengths)
    for one, other in zip(walked.step(step), sought.step(step), strict=True):
        assert one.tolist() == other.tolist()


def test_epochs_are_shuffled_anew_and_by_the_seed() -> None:
    order = SampleOrder(50, 50, 5, by_epochs=True)
    first, second = order.step(0)[0].tolist(), order.step(1)[0].tolist()
    other = SampleOrder(50, 50, 6, by_epochs=True).step(0)[0].tolist()
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


def test_grouping_saves_padding_and_stays_random() -> None:
    lengths = np.random.default_rng(4).lognormal(4, 0.8, 4000).astype(np.int64) + 1
    padding = {}
    for name, given_lengths in (("random", None), ("grouped", lengths)):
        order = SampleOrder(4000, 32, 5, by_epochs=True, lengths=given_lengths)
        batches = [order.step(step)[0] for step in range(order.steps_per_epoch)]
        padding[name] = sum(len(ids) * lengths[ids].max() for ids in batches) / lengths.sum()
        longest = [lengths[ids].max() for ids in batches]
        # A series of batches that only get longer would bias training towards the end of an epoch.
        rises = sum(a < b for a, b in itertools.pairwise(longest)) / len(longest)
        assert 0.3 < rises < 0.7
    assert padding["grouped"] < 1.2 < 2 < padding["random"]


@pytest.mark.parametrize("grouped", [False, True])
def test_evaluation_sees_each_sample_once_with_equal_work(grouped: bool) -> None:
    lengths = np.random.default_rng(5).integers(1, 9, 23) if grouped else None
    ranks = [eval_requests(lengths, 21, 5, rank=rank, data_size=3, micro_batch=4) for rank in range(3)]
    assert len({len(requests) for requests in ranks}) == 1
    seen = [sample for requests in ranks for request in requests if not request.idle for sample in request.samples]
    assert sorted(seen) == list(range(21))


def test_grouped_epochs_are_drawn_anew() -> None:
    lengths = np.random.default_rng(6).lognormal(4, 0.8, 4000).astype(np.int64) + 1
    order = SampleOrder(4000, 8, 5, by_epochs=True, lengths=lengths)
    mates: list[dict[int, set[int]]] = []
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.step(step)[0].tolist() for step in steps]
        mates.append({sample: set(batch) - {sample} for batch in batches for sample in batch})
    assert np.mean([len(mates[0][sample] & mates[1][sample]) / 7 for sample in range(4000)]) < 0.1


TEXTS = ["the cat", "the big red dog runs in the house", "", "he sees"]


def test_padding_is_that_of_the_tokenizer(bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    rows = tokenizer(TEXTS)["input_ids"]
    reference = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    samples = TokenizedSamples({"input_ids": Ragged(rows), "labels": [3, 1, 2, 0]})
    batch = PadCollate({"input_ids": tokenizer.pad_token_id})([samples[i] for i in range(len(samples))])
    assert torch.equal(batch["input_ids"], reference["input_ids"])
    assert torch.equal(batch["attention_mask"], reference["attention_mask"])
    assert batch["labels"].tolist() == [3, 1, 2, 0]
    assert batch["labels"].dtype == torch.int64


def test_causal_labels_leave_out_padding_and_the_first_token() -> None:
    samples = TokenizedSamples({"input_ids": Ragged([[5, 6, 7], [8]])})
    batch = CausalCollate(0)([samples[0], samples[1]])
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "attention_mask" not in CausalCollate(0, mask=False)([samples[0]])


def test_rows_without_a_token_get_one_of_padding() -> None:
    padded, filled = pad_rows([np.array([], dtype=np.int32)], 9)
    assert padded.tolist() == [[9]]
    assert not filled.any()


class Group:
    """Writes a file when it is collected. A process group's destructor would wait for its threads in the same way."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "collected"
        self.itself = self

    def __del__(self) -> None:
        self.file.touch()


class Collecting(Dataset[torch.Tensor]):
    """Collects garbage at each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(index)


def test_a_loader_process_leaves_the_garbage_of_its_parent(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        Group(tmp_path)
        requests = [BatchRequest([index], (0,), [index]) for index in range(4)]
        batches = list(load(Collecting(), Data(train=Collecting()), requests, workers=2, pin_memory=False))
        assert [batch.samples for batch in batches] == [[0], [1], [2], [3]]
        assert not (tmp_path / "collected").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "collected").exists()


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


def test_a_sample_beyond_the_budget_is_named(says: Says) -> None:
    with says(DataError):
        choose_shapes(np.array([3, 100, 101]), 100, 8)


def test_rounding_stops_at_the_longest() -> None:
    """A model with 100 positions cannot take 104."""
    assert padded_lengths(np.array([0, 1, 8, 9, 97, 100]), 8).tolist() == [8, 8, 8, 16, 100, 100]
    assert padded_lengths(np.array([0, 0]), 8).tolist() == [1, 1]
