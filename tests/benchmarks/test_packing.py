"""The packing benchmark. The tests check what was done, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import packing
from benchmarks.__main__ import main


def test_rows_are_full_of_documents() -> None:
    positions = packing.make_batch(4096)["position_ids"]
    begins = positions == 0
    assert positions[:, 0].tolist() == [0, 0]
    assert torch.equal(positions.diff(dim=1) == 1, ~begins[:, 1:])
    assert 60 < positions.numel() / int(begins.sum()) < 140


@pytest.mark.slow
def test_the_command_writes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing, "run_in_workers", lambda *arguments: [1.0])  # it would start separate processes
    assert main(["packing", "--rounds", "1", "--tokens", "128", "--output", str(tmp_path)]) == 0
    ways = json.loads((tmp_path / "packing.json").read_text())["ways"]
    assert [way["name"] for way in ways] == list(packing.WAYS)
    assert ways[0]["over_mask"] == 1
    assert "a mask of the row" in capsys.readouterr().out
