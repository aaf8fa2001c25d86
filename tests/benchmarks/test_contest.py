"""Contests: turns of loops and functions in new processes, ratios, and the answer to a question."""

import itertools
import os
from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from benchmarks.contest import Contest, bootstrap
from benchmarks.workers import Ended, Loop, StepDone, run_in_workers
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import join


def test_turns_are_taken_in_changing_orders_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    contest = Contest({name: lambda name=name: log.append(name) for name in "abc"})  # type: ignore[misc]
    contest.run(6, warmup=2)
    assert Counter(log) == {"a": 8, "b": 8, "c": 8}
    rounds = [log[i : i + 3] for i in range(0, 24, 3)]
    assert all(rounds[i + 1] == rounds[i][::-1] for i in range(0, 8, 2))
    assert len({tuple(names) for names in rounds}) > 2
    assert {name: len(seconds) for name, seconds in contest.seconds.items()} == {"a": 6, "b": 6, "c": 6}
    assert min(map(min, contest.seconds.values())) > 0


def test_ratios_are_taken_turn_by_turn() -> None:
    ours, theirs = iter((1.0, 2.0, 4.0)), iter((2.0, 1.0, 8.0))
    contest = Contest({"ours": lambda: next(ours), "theirs": lambda: next(theirs)}, work=8)
    contest.run(3)
    assert contest.ratios("ours", over="theirs") == [2.0, 0.5, 2.0]
    assert contest.ratio("ours", over="theirs") == 2.0
    assert contest.rates("ours") == [8.0, 4.0, 2.0]
    assert contest.rate("theirs") == 24 / 11


def test_the_interval_holds_what_drawing_anew_gives() -> None:
    low, high = bootstrap(lambda values: values.mean(axis=1), np.array([0.0, 1.0]))
    assert (low, high) == (0.0, 1.0)  # one of the two, drawn twice
    assert bootstrap(lambda a, b: (a - b).max(axis=1), np.arange(9.0), np.arange(9.0)) == (0.0, 0.0)  # same indices


def _counting(log: list[tuple[str, int]], name: str) -> Loop:
    def loop(step_done: StepDone) -> None:
        for step in itertools.count(1):
            log.append((name, step))
            step_done()

    return Loop(loop)


def test_each_runs_in_its_own_turn_only() -> None:
    log: list[tuple[str, int]] = []
    first, second = _counting(log, "first"), _counting(log, "second")
    for loop in (first, second, first):
        assert loop.advance(2) > 0
    first.close()
    second.close()
    assert log == [("first", 1), ("first", 2), ("second", 1), ("second", 2), ("first", 3), ("first", 4)]


def test_closing_ends_a_loop_that_catches_every_exception() -> None:
    ended = []

    def stubborn(step_done: StepDone) -> None:
        try:
            while True:
                try:
                    step_done()
                except Exception:
                    continue
        finally:
            ended.append(True)

    loop = Loop(stubborn)
    loop.advance(1)
    loop.close()
    assert ended == [True]


def test_an_error_in_a_loop_is_raised_by_its_turn() -> None:
    def broken(step_done: StepDone) -> None:
        step_done()
        raise ValueError("broken in step 2")

    loop = Loop(broken)
    loop.advance(1)
    with pytest.raises(RapidformerError, match="broken in step 2"):
        loop.advance(1)
    loop.close()


def _three_steps(step_done: StepDone, result: str) -> str:
    step_done.begin()
    for _ in range(3):
        step_done()
    return result


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_ends_tells_its_result(workers: int) -> None:
    loop = Loop(_three_steps, "all", workers=workers)
    assert loop.advance(99) == 0.0  # time before the start does not count
    with pytest.raises(Ended, match="ended early") as raised:
        loop.advance(99)
    assert raised.value.results == ["all"]
    loop.close()


def _dies(step_done: StepDone) -> None:
    os._exit(1)


def test_a_process_that_dies_is_an_error() -> None:
    loop = Loop(_dies, workers=1)
    with pytest.raises(RapidformerError, match="the loop's process ended"):
        loop.advance(1)
    loop.close()


def _averages(step_done: StepDone) -> float:
    with join("cpu") as workers:
        step_done.begin()
        for step in range(3):
            step_done(loss=workers.rank + step)
        return float(workers.sum(workers.rank + 1.0)[0])


@pytest.mark.distributed
def test_workers_of_one_loop_know_each_other() -> None:
    with closing(Loop(_averages, workers=2)) as loop:
        assert loop.advance(1) == 0.0  # the setup
        assert loop.advance(2) > 0
        assert loop.loss == 1.5  # of the second step: the mean of 1 and 2
        assert loop.finish() == [3.0, 3.0]


def _fails(rank: str) -> str:
    if os.environ.get("RANK") == rank:
        raise RapidformerError("this one is broken")
    return rank


def test_functions_run_in_new_processes_and_the_first_error_is_raised() -> None:
    assert run_in_workers(_fails, "7") == ["7"]
    with pytest.raises(RapidformerError, match="this one is broken"):
        run_in_workers(_fails, "1", workers=2)
