"""Runs that are killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.__main__ import main
from benchmarks.faults import (
    FaultReport,
    Kill,
    Life,
    Moments,
    difference,
    run_faults,
    spend_life,
)
from benchmarks.trainees import Place


@pytest.mark.longer
@pytest.mark.parametrize("kills", [2, 12])
def test_killed_runs_end_as_if_nobody_had_killed_them(kills: int, tmp_path: Path) -> None:
    report = run_faults(kills=kills, folder=tmp_path, seed=3)
    assert report.flawless, report.to_json()
    assert report.kills.total() == report.survived == kills
    assert report.complete == report.identical > 0


@pytest.mark.slow
def test_a_kill_waits_for_a_save(tmp_path: Path) -> None:
    life = spend_life("ours", tmp_path / "run", Kill(after=0.0, into_save=0.0))
    assert life.killed_in is Place.SAVE
    assert life.status is None


def test_moments_cover_the_life_and_half_of_them_the_saves() -> None:
    moments = Moments(0, Life(seconds=2.0, killed_in=None, status=0, saves=(0.01, 0.02, 0.09)))
    kills = [moments.next() for _ in range(400)]
    in_saves = [kill.into_save for kill in kills if kill.into_save is not None]
    assert len(in_saves) == 200
    assert 0 <= min(in_saves) < 0.002
    assert 0.022 < max(in_saves) <= 0.024  # slightly longer than the usual save
    assert min(kill.after for kill in kills) < 0.1
    assert 1.9 < max(kill.after for kill in kills) <= 2.0


def test_a_difference_is_named() -> None:
    whole = {"metrics": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}], "weights": [("w", b"12")]}
    assert difference(whole, whole) is None
    assert difference(whole, {**whole, "metrics": whole["metrics"][:1]}) == "metrics has 1 entries instead of 2"
    other = [whole["metrics"][0], {"step": 2, "loss": 1.25}]
    assert difference(whole, {**whole, "metrics": other}) == (
        "metrics, entry 2: {'step': 2, 'loss': 1.25} instead of {'step': 2, 'loss': 1.5}"
    )
    assert difference(whole, {**whole, "weights": [("w", b"13")]}) == "weights, entry 1: w"


def test_a_report_counts_what_went_wrong() -> None:
    report = FaultReport("x", Counter({Place.SAVE: 3, Place.STEP: 2}), ["run-1: gone"], ["run-2: weights"], complete=3)
    assert (report.survived, report.identical, report.flawless) == (4, 2, False)


def test_the_exit_status_tells_of_a_run_of_ours_that_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {
        "ours": FaultReport("ours", Counter({Place.SAVE: 2}), [], ["run-1: weights"], complete=1),
        "transformers": FaultReport("peer", Counter({Place.SAVE: 2}), ["run-1: no file step-3"], [], complete=0),
    }
    monkeypatch.setattr(faults, "run_faults", lambda kills, folder, seed, name, advance: results[name])
    assert main(["faults", "--kills", "2", "--json", str(tmp_path / "faults.json")]) == 1
    shown = capsys.readouterr().out
    assert "differs: run-1: weights" in shown
    assert "1 × could not resume: no file step-N" in shown
    solutions = json.loads((tmp_path / "faults.json").read_text())["solutions"]
    assert [solution["survived"] for solution in solutions] == [2, 1]
    results["ours"] = FaultReport("ours", Counter({Place.SAVE: 2}), complete=1)
    assert main(["faults", "--kills", "2", "--no-peer"]) == 0
