"""The graph benchmark. The tests check what was done, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import graph
from benchmarks.__main__ import main

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.longer
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = ("fp32", "ORT", "inductor")
    monkeypatch.setattr(graph, "SOLUTIONS", {name: graph.SOLUTIONS[name] for name in names})
    words = "graph --scale tiny --rounds 2 --steps 1 --device cpu --output"
    assert main([*words.split(), str(tmp_path)]) == 0
    result = json.loads((tmp_path / "graph.json").read_text())
    eager, ort = result["solutions"]
    assert (eager["name"], ort["name"]) == ("fp32", "ORT")
    assert eager["over_eager"] == 1
    assert ort["loss"] == pytest.approx(eager["loss"], rel=1e-4)  # with dropout, because the masks are the same
    assert eager["onnx_runtime"] is None
    assert eager["share_in_graphs"] == 0
    assert 0 < ort["share_in_graphs"] < 1
    assert {"BertLayer forward", "BertLayer backward"} <= {g["name"] for g in ort["onnx_runtime"]["graphs"]}
    assert set(result["absent"]) == {"mixed", "inductor"}
    assert result["published"]["ORT"] == [554.24, 2430]
    assert (tmp_path / "graph.png").stat().st_size > 0
    assert "goal: ORT at 1.10 × the samples/s of eager fp32" in capsys.readouterr().out


def test_a_solution_with_another_loss_is_told() -> None:
    row = {"name": "fp32", "loss": 2.0}
    other = {"name": "ORT", "loss": 2.01}
    assert graph._strayed([row, row]) == []
    assert graph._strayed([row, other]) == ["ORT: the last loss is 2.010000, eager's is 2.000000"]
