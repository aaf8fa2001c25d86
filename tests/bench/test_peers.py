"""The demo's job by this library and by transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer_templates.commands.bench import peers
from rapidformer_templates.commands.bench.cli import main
from rapidformer_templates.commands.bench.peers_job import SOLUTIONS, Watch
from tests.support.demo import needs_packages


@needs_packages
@pytest.mark.exhaustive
def test_the_solutions_train_and_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["peers", "--repeats", "1", "--train", "96", "--held-out", "16", "--output", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "× transformers, dynamic padding; goal 1.4 ×" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"peers.json", "peers.png"}


def test_ratios_are_taken_within_a_repeat() -> None:
    speeds = {peers.OURS: (30.0, 10.0), "transformers, dynamic padding": (20.0, 5.0)}
    runs = {name: [{"samples_per_second": speed} for speed in values] for name, values in speeds.items()}
    assert peers.ratios(runs, "transformers, dynamic padding") == [1.5, 2.0]


def test_goals_are_about_solutions() -> None:
    assert {peers.OURS, *peers.GOALS} == SOLUTIONS.keys()


def test_the_clock_stands_while_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def others_take_100_seconds() -> None:
        nonlocal now
        now += 100

    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Watch(others_take_100_seconds)
    watch.training_starts()
    for _ in range(9):
        now += 1
        watch.step_ends()
    assert watch.seconds == 9
    assert now == 9 + 3 * 100  # before the first step, after the fourth and after the eighth
