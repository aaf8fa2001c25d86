"""Loops that take turns."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.turns import PausedLoop, StepDone


def _counting(log: list[tuple[str, int]], name: str) -> PausedLoop:
    def loop(step_done: StepDone) -> None:
        for step in itertools.count(1):
            log.append((name, step))
            step_done()

    return PausedLoop(loop)


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

    loop = PausedLoop(stubborn)
    loop.advance(1)
    loop.close()
    assert ended == [True]


def test_closing_before_the_first_turn_does_nothing() -> None:
    _counting([], "never").close()


def test_an_error_in_a_loop_is_raised_by_its_turn() -> None:
    def broken(step_done: StepDone) -> None:
        step_done()
        raise ValueError("broken in step 2")

    loop = PausedLoop(broken)
    loop.advance(1)
    with pytest.raises(ValueError, match="broken in step 2"):
        loop.advance(1)
    loop.close()


def test_a_loop_that_ends_too_early_is_an_error() -> None:
    loop = PausedLoop(lambda step_done: step_done())
    loop.advance(1)
    with pytest.raises(RuntimeError, match="ended by itself"):
        loop.advance(1)
