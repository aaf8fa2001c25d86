"""Contests: turns, ratios, and the answer to a question."""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
import pytest
from rich.console import Console

from benchmarks.__main__ import QUESTIONS, answer_to, main
from benchmarks.contest import Contest, Flag, bootstrap, mean_sd, median_sd, table


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


def test_a_table_is_made_of_formats_and_functions(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"way": "{name}", "speed": "{rate:,.1f}", "more": lambda row: mean_sd(row["values"])}
    Console(width=80).print(table("a title", [{"name": "ours", "rate": 1234.56, "values": [1.0, 3.0]}], columns))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("a title", "way", "ours", "1,234.6", "2.00 ± 1.41"))
    assert median_sd([1.0, 2.0, 6.0], ".1f") == "2.0 ± 2.6"


def test_flags_refuse_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    for flag in (Flag("rounds", 3, "turns"), Flag("size", 1.5, "GB"), Flag("bf16", False, "narrow")):
        flag.add(parser)
    assert vars(parser.parse_args(["--size", "2", "--bf16"])) == {"rounds": 3, "size": 2.0, "bf16": True}
    for words in (["--rounds", "0"], ["--size", "-1"], ["--rounds", "1.5"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
    assert "must be more than 0" in capsys.readouterr().err


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_its_flags(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([question, "--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{flag.name}" in shown for flag in answer_to(question).flags)
    assert QUESTIONS[question][1] in " ".join(shown.split())
