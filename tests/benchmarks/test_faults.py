"""Runs that are killed or broken, and resumed."""

from pathlib import Path

import pytest

from benchmarks.faults import Layout, Solution, run_faults
from benchmarks.killed import Ours, Place

OURS = Ours()


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


@pytest.mark.distributed
def test_faults_of_two_workers_are_reported_and_the_run_continues(tmp_path: Path) -> None:
    layout = Layout("ddp", tmp_path)
    rows = {fault: layout.provoke(fault) for fault in ("a flipped bit in a weight", "NaN in the loss", "os._exit(0)")}
    assert [row["status"] for row in rows.values()] == [5, 3, 1]
    assert all(row["resumed"] and row["difference"] is None and not row["has_stack"] for row in rows.values())
    assert rows["a flipped bit in a weight"]["printed"].startswith("after step 9 worker 0 on node and worker 1 on node")
    assert "worker 1 on node" in rows["NaN in the loss"]["printed"]
    assert all(row["left_at_the_end"] == [] for row in rows.values())
