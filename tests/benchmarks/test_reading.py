"""Readers of an indexed set of a few MB. The tests check what was read, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import reading
from benchmarks.__main__ import main


@pytest.mark.longer
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BATCHES": 1, "DOCUMENTS": 50}.items():
        monkeypatch.setattr(reading, name, value)
    words = "reading --repeats 2 --megatokens 6 --samples 4000 --output"
    assert main([*words.split(), str(tmp_path)]) == 0
    result = json.loads((tmp_path / "reading.json").read_text())
    samples, documents = result["contests"]
    assert (samples["what"], samples["count"]) == (reading.SAMPLES, reading.BATCH)
    assert (documents["what"], documents["count"]) == ("random documents", 50)
    assert {reading.OURS, reading.LIMIT} <= samples["seconds"].keys()
    assert all(len(seconds) == 2 for contest in (samples, documents) for seconds in contest["seconds"].values())
    assert result["first_batch"]["samples"] == 4000
    assert min(result["first_batch"]["anonymous_mb"]) > 0
    assert (tmp_path / "reading.png").stat().st_size > 0
    assert "first batch of 4,000 samples" in capsys.readouterr().out
