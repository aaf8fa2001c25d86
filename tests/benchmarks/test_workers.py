"""Loops that take turns, and functions in new processes."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from typing import Any

import pytest

from benchmarks.workers import Ended, Loop, StepDone, run_in_workers
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import join


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


def test_closing_before_the_first_turn_does_nothing() -> None:
    _counting([], "never").close()


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


def test_a_loop_can_be_let_to_its_end() -> None:
    loop = Loop(_three_steps, "all")
    assert loop.finish() == ["all"]
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
@pytest.mark.slow
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


class _Line:
    """A line on which the others take 100 seconds for each of their turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def send(self, told: tuple[float, float]) -> None:
        self.told = told[0]

    def recv(self) -> int:
        self.now += 100
        return 4


def test_the_clock_stands_while_others_have_their_turn() -> None:
    line: Any = _Line()
    step_done = StepDone(line, lambda: line.now)
    step_done.begin()
    for _ in range(9):
        line.now += 1
        step_done()
    assert step_done.seconds == 9
    assert line.told == 8
    assert line.now == 9 + 3 * 100  # before the first step, after the fourth and after the eighth
