"""Runs that are killed or broken, and resumed."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.__main__ import main
from benchmarks.faults import FaultReport, Kill, Layout, Life, Solution, run_faults
from benchmarks.killed import Ours, Place, TransformersTrainer, difference

OURS = Ours()
LIFE = Life(seconds=2.0, killed_in=None, status=0, saves=(0.01, 0.02, 0.09), first_step=0.5)


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_killed_runs_end_as_if_nobody_had_killed_them(kills: int, tmp_path: Path) -> None:
    report = run_faults(Solution(OURS), kills=kills, folder=tmp_path, seed=3)
    assert report.flawless, report.to_json()
    assert report.kills.total() == report.survived == kills
    assert report.complete == report.identical > 0


@pytest.mark.distributed
def test_runs_of_two_workers_are_killed_and_continue(tmp_path: Path) -> None:
    """Nine kills: a worker, the launcher and all of them, each in a save, in an exchange and at any time."""
    group = Solution(Ours("ddp", "--nproc-per-node 2", steps=6), workers=2)
    report = run_faults(group, kills=9, folder=tmp_path, seed=3)
    assert report.flawless, report.to_json()
    assert report.survived == 9
    assert report.victims == {"worker": 3, "launcher": 3, "all": 3}
    assert report.kills[Place.SAVE] >= 3
    assert report.kills[Place.EXCHANGE] >= 3
    assert report.complete == report.identical > 0


def test_files_that_only_a_killed_run_has_are_leftovers(tmp_path: Path) -> None:
    class Stub(Solution):
        def __init__(self) -> None:
            super().__init__(OURS)
            self.outcome = lambda run: {}

        def spend_life(self, run: Path, kill: Kill | None = None) -> Life:
            Path(f"{run}.tmp").mkdir(parents=True, exist_ok=True)
            run.mkdir(exist_ok=True)
            self.has_struck = kill is not None
            if kill:
                (Path(f"{run}.tmp") / "rapidformer-x").touch()
            return LIFE._replace(killed_in=Place.STEP if kill else None, end=3.0)

    report = run_faults(Stub(), kills=2, folder=tmp_path)
    assert report.leftovers == ["run-1: .tmp/rapidformer-x"]
    assert (report.slowest, report.flawless) == ((3.0, "run-1: all, step"), False)


def test_a_difference_is_named() -> None:
    whole = {"metrics": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}], "weights": [("w", b"12")]}
    assert difference(whole, whole) is None
    assert difference(whole, {**whole, "metrics": whole["metrics"][:1]}) == "metrics has 1 entries instead of 2"
    other = [whole["metrics"][0], {"step": 2, "loss": 1.25}]
    assert difference(whole, {**whole, "metrics": other}) == (
        "metrics, entry 2: {'step': 2, 'loss': 1.25} instead of {'step': 2, 'loss': 1.5}"
    )
    assert difference(whole, {**whole, "weights": [("w", b"13")]}) == "weights, entry 1: w"


def test_the_exit_status_tells_of_a_run_of_ours_that_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = FaultReport("peer", Counter({Place.SAVE: 2}), ["run-1: no file step-3"], [], complete=0)
    results = {
        OURS.name: FaultReport("ours", Counter({Place.SAVE: 2}), [], ["run-1: weights"], complete=1),
        TransformersTrainer().name: peer,
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


@pytest.mark.distributed
def test_faults_of_two_workers_are_reported_and_the_run_continues(tmp_path: Path) -> None:
    layout = Layout("ddp", tmp_path)
    rows = {fault: layout.provoke(fault) for fault in ("a flipped bit in a weight", "NaN in the loss", "os._exit(0)")}
    assert [row["status"] for row in rows.values()] == [5, 3, 1]
    assert all(row["resumed"] and row["difference"] is None and not row["has_stack"] for row in rows.values())
    assert rows["a flipped bit in a weight"]["printed"].startswith("after step 9 worker 0 on node and worker 1 on node")
    assert "worker 1 on node" in rows["NaN in the loss"]["printed"]
    assert all(row["left_at_the_end"] == [] for row in rows.values())
