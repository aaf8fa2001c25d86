"""The table of faults in runs of several workers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks import fault_table
from benchmarks.__main__ import main
from benchmarks.fault_table import Layout, Row, first_error


@pytest.mark.longer
@pytest.mark.distributed
def test_faults_of_two_workers_are_reported_and_the_run_continues(tmp_path: Path) -> None:
    layout = Layout("ddp", tmp_path)
    rows = {fault: layout.provoke(fault) for fault in ("a flipped bit in a weight", "NaN in the loss", "os._exit(0)")}
    assert [row["status"] for row in rows.values()] == [5, 3, 1]
    assert all(row["resumed"] and row["difference"] is None and not row["has_stack"] for row in rows.values())
    assert rows["a flipped bit in a weight"]["printed"].startswith("after step 9 worker 0 on node and worker 1 on node")
    assert "worker 1 on node" in rows["NaN in the loss"]["printed"]
    assert all(row["left_at_the_end"] == [] for row in rows.values())


def test_the_first_error_of_a_log_and_its_place_are_shown() -> None:
    host = socket.gethostname()
    log = f"step 7/12\nerror: worker 1 on {host} hangs\n  where  train.py:8\n  help   wait\nerror: other\n"
    assert first_error(log) == "worker 1 on node hangs; train.py:8"
    assert first_error("error: a\n  help   b\n") == "a"
    assert first_error("step 7/12\nstep 9/12  saved\n") == "step 9/12  saved"
    assert first_error("") == ""


@pytest.mark.parametrize(("difference", "status"), [(None, 0), ("weights, entry 1: w", 1)])
def test_a_run_that_does_not_continue_decides_the_status(
    difference: str | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stub:
        def __init__(self, engine: str, folder: Path) -> None:
            self.engine = engine

        def provoke(self, fault: str) -> Row:
            return Row(
                engine=self.engine, fault=fault, seconds=0.3, printed="a worker is gone", has_stack=False, status=1,
                left=[], left_at_the_end=[], resumed=True, difference=difference,
            )  # fmt: skip

    monkeypatch.setattr(fault_table, "Layout", Stub)
    assert main(["fault-table", "--engine", "ddp"]) == status
    assert "a worker is gone" in capsys.readouterr().out
    assert main(["fault-table", "--engine", "fsdp", "--fault", "kill"]) == status
    shown = capsys.readouterr().out
    assert {name for name in ("kill", "NaN") if name in shown} == {"kill"}
