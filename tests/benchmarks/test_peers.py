"""The demo's job with this library and with transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.peers import SOLUTIONS
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
