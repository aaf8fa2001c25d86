"""The benchmark of mixtures. The tests check what was done, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import moe
from benchmarks.__main__ import main


@pytest.mark.longer
@pytest.mark.slow
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MEGABYTES": 0.3, "ROWS": 8}.items():
        monkeypatch.setattr(moe, name, value)
    monkeypatch.setattr(moe, "SHAPE", {"tokens": 64, "hidden": 16, "width": 32})
    assert main(["moe", "--steps", "12", "--rounds", "2", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "moe.json").read_text())
    dense, sparse = result["runs"]
    gates = moe.LAYERS * moe.EXPERTS * moe.HIDDEN
    biases = moe.LAYERS * moe.HIDDEN * (moe.TOP_K - 1)
    assert dense["parameters"] == dense["active"] == sparse["active"] - gates - biases
    assert sparse["parameters"] > 2 * dense["parameters"]
    for run in (dense, sparse):
        losses = [loss for _, loss in run["losses"]]
        assert losses == sorted(losses, reverse=True)
        assert run["losses"][-1][0] == 12 * moe.ROWS * moe.LENGTH
    assert 0 <= sparse["load"]["min"] < 1 < sparse["load"]["max"] < 16
    assert min(result["grouped_over"].values()) > 0
    assert (tmp_path / "moe.png").stat().st_size > 0
    assert "expert load within a factor of 2" in capsys.readouterr().out
