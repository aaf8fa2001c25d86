"""The benchmark of mixtures. The tests check what was done, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import moe, small_gpt
from benchmarks.__main__ import main


@pytest.mark.longer
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_gpt, "HELD_OUT", 8)
    monkeypatch.setattr(moe, "BYTES", 100_000)
    monkeypatch.setattr(moe, "SHAPE", {"tokens": 64, "hidden": 16, "width": 32})
    assert main(["moe", "--steps", "12", "--rounds", "2", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "moe.json").read_text())
    dense, sparse = result["ways"]
    gates = moe.LAYERS * moe.EXPERTS * moe.HIDDEN
    biases = moe.LAYERS * moe.HIDDEN * (moe.TOP_K - 1)
    assert dense["parameters"] == dense["active"] == sparse["active"] - gates - biases
    assert sparse["parameters"] > 2 * dense["parameters"]
    assert max(dense["loss"], sparse["loss"]) < 5.5  # ln 256 = 5.55
    assert 0 <= sparse["load"]["min"] < 1 < sparse["load"]["max"] < 16
    assert min(result["grouped_over"].values()) > 0
    assert (tmp_path / "moe.png").stat().st_size > 0
    assert "expert load within a factor of 2" in capsys.readouterr().out
