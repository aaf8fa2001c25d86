"""Runs that are killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.__main__ import main
from benchmarks.faults import Kill, SingleProcess
from benchmarks.killed_runs import FaultReport, Life, difference, run_faults
from benchmarks.trainees import TRAINEES, Ours, Place
from benchmarks.worker_faults import Group, GroupKill, Victim

OURS = TRAINEES["ours"]
LIFE = Life(seconds=2.0, killed_in=None, status=0, saves=(0.01, 0.02, 0.09), start=0.5)


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.longer), pytest.param(12, marks=pytest.mark.exhaustive)]
)
def test_killed_runs_end_as_if_nobody_had_killed_them(kills: int, tmp_path: Path) -> None:
    report = run_faults(SingleProcess(OURS), kills=kills, folder=tmp_path, seed=3)
    assert report.flawless, report.to_json()
    assert report.kills.total() == report.survived == kills
    assert report.complete == report.identical > 0


@pytest.mark.slow
def test_a_kill_waits_for_a_save(tmp_path: Path) -> None:
    life = SingleProcess(OURS).spend_life(tmp_path / "run", Kill(after=0.0, into_save=0.0))
    assert life.killed_in is Place.SAVE
    assert life.status is None


@pytest.mark.longer
@pytest.mark.distributed
def test_runs_of_two_workers_are_killed_and_continue(tmp_path: Path) -> None:
    """Nine kills: a worker, the launcher and all of them, each in a save, in an exchange and at any time."""
    group = Group(Ours("ddp", "--nproc-per-node 2", steps=6), workers=2)
    report = run_faults(group, kills=9, folder=tmp_path, seed=3)
    assert report.flawless, report.to_json()
    assert report.survived == 9
    assert report.victims == {"worker": 3, "launcher": 3, "all": 3}
    assert report.kills[Place.SAVE] >= 3
    assert report.kills[Place.EXCHANGE] >= 3
    assert report.complete == report.identical > 0


def test_a_third_of_the_kills_of_several_workers_is_in_saves_and_a_third_in_exchanges() -> None:
    group = Group(Ours("ddp"), workers=4)
    kills: list[GroupKill] = []
    moments = group.moments(0, LIFE)
    for number in range(900):
        kills.append(next(moments))
        group.has_struck = number % 3 > 0  # every third moment comes after the end of the run
    struck = [kill for number, kill in enumerate(kills) if number % 3]
    counts = Counter((kill.victim, kill.place) for kill in struck)
    assert set(counts) == {(victim, place) for victim in Victim for place in (Place.SAVE, Place.EXCHANGE, None)}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {kill.worker for kill in kills} == {0, 1, 2, 3}
    assert all(kill.after <= (1.5 if kill.place else 2.0) for kill in kills)


def test_files_that_only_a_killed_run_has_are_leftovers(tmp_path: Path) -> None:
    class Stub(SingleProcess):
        def outcome(self, run: Path) -> dict[str, list[object]]:
            return {}

        def spend_life(self, run: Path, kill: Kill | None = None) -> Life:
            Path(f"{run}.tmp").mkdir(parents=True, exist_ok=True)
            run.mkdir(exist_ok=True)
            if kill:
                (Path(f"{run}.tmp") / "rapidformer-x").touch()
            return LIFE._replace(killed_in=Place.STEP if kill else None, end=3.0)

    report = run_faults(Stub(OURS), kills=2, folder=tmp_path)
    assert report.leftovers == ["run-1: .tmp/rapidformer-x"]
    assert (report.slowest_end, report.slowest_kill, report.flawless) == (3.0, "run-1: process, step", False)


def test_moments_cover_the_life_and_half_of_them_the_saves() -> None:
    moments = SingleProcess(OURS).moments(0, LIFE)
    kills = list(islice(moments, 400))
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
    peer = FaultReport("peer", Counter({Place.SAVE: 2}), ["run-1: no file step-3"], [], complete=0)
    results = {
        OURS.name: FaultReport("ours", Counter({Place.SAVE: 2}), [], ["run-1: weights"], complete=1),
        TRAINEES["transformers"].name: peer,
    }
    monkeypatch.setattr(faults, "run_faults", lambda solution, *others: results[solution.name])
    assert main(["faults", "--kills", "2", "--json", str(tmp_path / "faults.json")]) == 1
    shown = capsys.readouterr().out
    assert "differs: run-1: weights" in shown
    assert "1 × could not resume: no file step-N" in shown
    solutions = json.loads((tmp_path / "faults.json").read_text())["solutions"]
    assert [solution["survived"] for solution in solutions] == [2, 1]
    results[OURS.name] = FaultReport("ours", Counter({Place.SAVE: 2}), complete=1)
    assert main(["faults", "--kills", "2", "--no-peer"]) == 0
