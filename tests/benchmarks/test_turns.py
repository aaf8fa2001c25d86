"""Loops that take turns."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

from benchmarks.turns import Ended, Loop, StepDone
from rapidformer_templates.errors import RapidformerError


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
        assert not step_done.is_last
        step_done()
    return result


@pytest.mark.parametrize("process", [False, True])
def test_a_loop_that_ends_tells_its_result(process: bool) -> None:
    loop = Loop(_three_steps, "all", process=process)
    assert loop.advance(99) == 0.0  # time before the start does not count
    with pytest.raises(Ended, match="ended early") as raised:
        loop.advance(99)
    assert raised.value.result == "all"
    loop.close()


def test_a_loop_can_be_let_to_its_end() -> None:
    loop = Loop(_three_steps, "all")
    assert loop.finish() == "all"
    loop.close()


def _dies(step_done: StepDone) -> None:
    os._exit(1)


def test_a_process_that_dies_is_an_error() -> None:
    loop = Loop(_dies, process=True)
    with pytest.raises(RapidformerError, match="the loop's process ended"):
        loop.advance(1)
    loop.close()


class _Line:
    """A line on which the others take 100 seconds for each of their turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def send(self, seconds: float) -> None:
        self.told = seconds

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
