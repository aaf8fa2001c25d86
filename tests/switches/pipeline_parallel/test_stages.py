"""Stages have the lowest cost, and schedules make every pass once, cannot deadlock, and equal torch's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops, _get_warmup_ops

from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.switches.layout.schedule import Action, Kind, compute_schedule, with_transfers

COSTS = st.integers(0, 6)


@settings(deadline=None)
@given(front=COSTS, blocks=st.lists(st.integers(1, 5), min_size=1, max_size=7), back=COSTS, data=st.data())
def test_a_cut_is_the_best_of_all_cuts(front: int, blocks: list[int], back: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(blocks)))

    def costs(sizes: tuple[int, ...]) -> tuple[int, int]:
        edges = [0, *itertools.accumulate(sizes)]
        each = [sum(blocks[a:b]) for a, b in itertools.pairwise(edges)]
        each[0], each[-1] = each[0] + front, each[-1] + back
        return max(each), sum(cost**2 for cost in each)

    borders = itertools.combinations(range(1, len(blocks)), stages - 1)
    every = (tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(blocks)))) for cuts in borders)
    found = tuple(balanced_cut(front, blocks, back, stages))
    assert sum(found) == len(blocks)
    assert costs(found) == min(costs(sizes) for sizes in every)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 3 stages"):
        balanced_cut(0, [1, 1], 0, 3)


SIZES = [(w, v, m) for w in range(1, 6) for v in range(1, 4) for m in range(1, 11) if w > 1 or v == 1]


@pytest.mark.parametrize("workers", range(1, 6))
def test_every_pass_is_made_once_and_after_what_it_needs(workers: int) -> None:
    """Simulate workers that stop at any action whose inputs are missing, and at a receive of something not yet sent.

    A worker also stops at a transfer until the neighbour has received the previous one in the same direction.
    """
    for _, per_worker, microbatches in (sizes for sizes in SIZES if sizes[0] == workers):
        lists = [list(own) for own in with_transfers(workers, per_worker, microbatches)]
        last, sent, done = workers * per_worker - 1, set(), []
        on_their_way = OnTheirWay(workers, 1)
        while any(lists):
            moved = False
            for own in lists:
                while own and _may_be_done(own[0], sent, done, last) and on_their_way.room(own[0]):
                    action = own.pop(0)
                    on_their_way.see(action)
                    if action.kind is Kind.SEND_FORWARD:
                        sent.add((Kind.RECEIVE_FORWARD, action.stage + 1, action.microbatch))
                    elif action.kind is Kind.SEND_BACKWARD:
                        sent.add((Kind.RECEIVE_BACKWARD, action.stage - 1, action.microbatch))
                    else:
                        done.append(action)
                    moved = True
            assert moved, (workers, per_worker, microbatches)
        passes = [action for action in done if action.kind in (Kind.FORWARD, Kind.BACKWARD)]
        assert len(passes) == len(set(passes)) == 2 * (last + 1) * microbatches


class OnTheirWay:
    """Transfers that each worker has sent in each direction and that its neighbour has not begun to receive."""

    def __init__(self, workers: int, limit: int) -> None:
        self.workers, self.limit = workers, limit
        self._sent: dict[tuple[int, bool], list[Action]] = defaultdict(list)
        self._taken: set[Action] = set()

    def room(self, action: Action) -> bool:
        """Return whether a worker can continue with this action without waiting."""
        before = self._sent[action.stage % self.workers, action.kind is Kind.SEND_FORWARD]
        is_transfer = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        return not is_transfer or len(before) < self.limit or before[-self.limit] in self._taken

    def see(self, action: Action) -> None:
        """Record an action that is done."""
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self._sent[action.stage % self.workers, action.kind is Kind.SEND_FORWARD].append(action)
        elif action.kind is Kind.RECEIVE_FORWARD:
            self._taken.add(Action(Kind.SEND_FORWARD, action.stage - 1, action.microbatch))
        elif action.kind is Kind.RECEIVE_BACKWARD:
            self._taken.add(Action(Kind.SEND_BACKWARD, action.stage + 1, action.microbatch))


def test_only_the_first_and_last_transfers_of_a_step_may_have_to_wait() -> None:
    """For any number of micro batches, a neighbour that has answered has received the transfer two sends before."""
    waits = {count: sum(not known for sends in _heard(4, count) for _, known in sends) for count in (8, 16, 40)}
    assert waits[8] == waits[16] == waits[40] < 8


def _heard(workers: int, microbatches: int) -> Iterator[list[tuple[Action, bool]]]:
    """Yield each worker's sends, with whether its neighbour is known to have reached the receive two sends before."""
    lists = with_transfers(workers, 1, microbatches)
    for rank, own in enumerate(lists):
        reached = dict.fromkeys((rank - 1, rank + 1), -1)  # the last action of each neighbour that this worker knows of
        known = []
        sent: dict[Kind, list[Action]] = defaultdict(list)
        for action in own:
            kind, stage, number = action
            if kind is Kind.FORWARD and stage > 0:
                reached[rank - 1] = lists[rank - 1].index(Action(Kind.SEND_FORWARD, stage - 1, number))
            elif kind is Kind.BACKWARD and stage < workers - 1:
                reached[rank + 1] = lists[rank + 1].index(Action(Kind.SEND_BACKWARD, stage + 1, number))
            elif kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                way = 1 if kind is Kind.SEND_FORWARD else -1
                taking = Kind.RECEIVE_FORWARD if way == 1 else Kind.RECEIVE_BACKWARD
                if len(sent[kind]) >= 2:
                    there = lists[rank + way].index(Action(taking, stage + way, sent[kind][-2].microbatch))
                    known.append((action, there <= reached[rank + way]))
                sent[kind].append(action)
        yield known


def _may_be_done(action: Action, sent: set[object], done: list[Action], last: int) -> bool:
    kind, stage, number = action
    if kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
        return (kind, stage, number) in sent
    if kind is Kind.FORWARD:
        return stage == 0 or Action(Kind.RECEIVE_FORWARD, stage, number) in done
    if kind is Kind.BACKWARD:
        own = Action(Kind.FORWARD, stage, number) in done
        return own and (stage == last or Action(Kind.RECEIVE_BACKWARD, stage, number) in done)
    return Action(Kind.FORWARD if kind is Kind.SEND_FORWARD else Kind.BACKWARD, stage, number) in done


@pytest.mark.parametrize("workers", range(2, 6))
def test_two_workers_name_their_transfers_in_one_order(workers: int) -> None:
    """Over a link that carries one transfer at a time, another order would deadlock."""
    for _, per_worker, microbatches in (sizes for sizes in SIZES if sizes[0] == workers):
        lists = with_transfers(workers, per_worker, microbatches)
        for a, b in itertools.combinations(range(workers), 2):
            assert list(_between(lists[a], b, workers)) == list(_between(lists[b], a, workers))


def _between(actions: Sequence[Action], peer: int, workers: int) -> list[tuple[str, int, int]]:
    found = []
    for kind, stage, number in actions:
        direction = 1 if kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
        if kind not in (Kind.FORWARD, Kind.BACKWARD) and (stage + direction) % workers == peer:
            sender = stage if kind.value.startswith("send") else stage + direction
            found.append((kind.value[-1], sender, number))
    return found


@pytest.mark.parametrize(
    ("workers", "per_worker", "microbatches"),
    [(2, 1, 4), (4, 1, 8), (4, 1, 4), (2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 3)],
)
def test_orders_are_those_of_torch(workers: int, per_worker: int, microbatches: int) -> None:
    rounds = max(1, microbatches // workers)
    size = microbatches // rounds
    for rank in range(workers):
        warmup = _get_warmup_ops(rank, per_worker, size, workers, microbatches, 1 if per_worker == 1 else 2)
        in_all = per_worker * microbatches
        theirs = _get_1f1b_rank_ops(
            per_worker,
            workers,
            warmup,
            in_all - warmup,
            warmup,
            rank,
            lambda step, rank=rank: (step // size) % per_worker * workers + rank,
            lambda step, rank=rank, warmup=warmup: (
                (per_worker - 1 - ((step - warmup) // size) % per_worker) * workers + rank
            ),
        )
        expected = [(str(a.computation_type.value), a.stage_index, a.microbatch_index) for a in theirs if a]
        ours = compute_schedule(workers, rank, per_worker, microbatches)
        assert [(a.kind.value, a.stage, a.microbatch) for a in ours] == expected


def test_early_stages_hold_more_micro_batches() -> None:
    """1F1B: a stage holds one micro batch for each stage from it to the end, for any number of micro batches."""
    for rank in range(4):
        held = most = 0
        for action in compute_schedule(4, rank, 1, 12):
            held += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, held)
        assert most == 4 - rank
