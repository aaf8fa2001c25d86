"""Contests: ratios turn by turn, and loops in separate processes that fail, end or work together."""

import os
from contextlib import closing

import pytest

from benchmarks.contest import Contest
from benchmarks.workers import Ended, Loop, StepDone
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import join


def test_ratios_are_taken_turn_by_turn() -> None:
    ours, theirs = iter((1.0, 2.0, 4.0)), iter((2.0, 1.0, 8.0))
    contest = Contest({"ours": lambda: next(ours), "theirs": lambda: next(theirs)}, work=8)
    contest.run(3)
    assert contest.ratios("ours", over="theirs") == [2.0, 0.5, 2.0]
    assert contest.ratio("ours", over="theirs") == 2.0
    assert contest.rates("ours") == [8.0, 4.0, 2.0]
    assert contest.rate("theirs") == 24 / 11


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
