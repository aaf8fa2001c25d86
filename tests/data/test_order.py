"""The order of the samples depends only on the seed and the step."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.loader import BatchRequest, eval_requests, train_requests
from rapidformer_templates.data.order import WINDOW, SampleOrder
from rapidformer_templates.data.random_streams import NewestEpochs

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
    """Each epoch has different batches, in an order that does not depend on the lengths."""
    lengths = np.random.default_rng(6).lognormal(4, 0.8, 4000).astype(np.int64) + 1
    order = SampleOrder(4000, 8, 5, by_epochs=True, lengths=lengths)
    mates: list[dict[int, set[int]]] = []
    for epoch in range(2):
        batches = [
            order.step(epoch * order.steps_per_epoch + step)[0].tolist() for step in range(order.steps_per_epoch)
        ]
        mates.append({sample: set(batch) - {sample} for batch in batches for sample in batch})
        means = [lengths[batch].mean() for batch in batches]
        # There are 500 positions. Random ones correlate with a standard deviation of 0.045.
        for places in (np.arange(len(means)), np.arange(len(means)) % WINDOW):
            assert abs(np.corrcoef(places, means)[0, 1]) < 0.2
    kept = np.mean([len(mates[0][sample] & mates[1][sample]) / 7 for sample in range(4000)])
    assert kept < 0.1


class _Drawing:
    """Draws numbers for epochs, and records when it does."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.numbers = NewestEpochs(self.draw)

    def draw(self, epoch: int) -> int:
        self.calls.append(epoch)
        return 10 * epoch


def test_an_epoch_is_drawn_once_until_the_next_but_one() -> None:
    drawing = _Drawing()
    assert [drawing.numbers[epoch] for epoch in (0, 1, 0, 1, 2, 1, 0)] == [0, 10, 0, 10, 20, 10, 0]
    assert drawing.calls == [0, 1, 2, 0]
    copy = pickle.loads(pickle.dumps(drawing))
    assert (copy.numbers[2], copy.calls) == (20, [0, 1, 2, 0, 2])  # the copy has no number yet


def test_a_copy_of_an_order_has_the_same_samples() -> None:
    order = SampleOrder(10, 4, 5, by_epochs=False)
    expected = [order.step(step)[0].tolist() for step in range(6)]
    copy = pickle.loads(pickle.dumps(order))
    assert [copy.step(step)[0].tolist() for step in range(6)] == expected
