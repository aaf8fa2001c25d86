"""Memory of less than a MB of streamed text. The tests check what was read, and never the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.streaming import STREAMED, TASKS, WHOLE, WINDOWS, make_text


@pytest.mark.longer
def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["streaming", "--megabytes", "0.2", "--folder", str(tmp_path), "--json", str(tmp_path / "f.json")]) == 0
    result = json.loads((tmp_path / "f.json").read_text())
    assert [row["way"] for row in result["rows"]] == list(TASKS)
    tokens = {row["way"]: row["tokens"] for row in result["rows"]}
    # A pass ends with its last full batch. Windows also count the ends of texts.
    assert tokens[WHOLE] > 20_000
    assert [tokens[way] for way in (STREAMED, WINDOWS)] == pytest.approx([tokens[WHOLE]] * 2, rel=0.02)
    assert "the peak grows to 1.00 × (goal 1.3 ×): reached" in capsys.readouterr().out
    assert STREAMED in result["growth"]


def test_the_text_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    make_text(tmp_path, 1.2)
    files = list(tmp_path.glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) == pytest.approx(1.2e6, rel=0.02)
    assert all(json.loads(line)["text"] for file in files for line in file.read_text().splitlines())
