"""The command that measures the published tables. The tests never check how long anything took."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.tables import TABLES
from rapidformer_templates.commands.bench.models import cpu_is_fast_at_bf16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("partitioning --scale paper --device cpu", "4 workers with a GPU each, but there are 0 GPUs"),
        ("partitioning --solutions none,zero-4", "there is no solution zero-4"),
        ("parallel --scale huge", "parallel has no scale huge"),
    ],
)
def test_mistakes_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def _measured(folder: Path, words: str) -> dict[str, dict[str, object]]:
    own = f"--scale tiny --device cpu --rounds 2 --output {folder}"
    assert main([*words.split(), *own.split()]) == 0
    (file,) = folder.glob("*.json")
    assert file.with_suffix(".png").stat().st_size > 0
    result = json.loads(file.read_text())
    assert result["failed"] == []
    rows = {row["name"]: row for row in result["solutions"]}
    for row in rows.values():
        assert row["samples_per_second"] > 0
        assert len(row["seconds"]) == 2
        assert row["peak_mb"] >= row["setup_mb"] >= row["before_mb"] > 100  # torch alone takes as much
    return rows


@pytest.mark.distributed
def test_a_solution_of_two_workers_is_compared_with_its_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _measured(tmp_path, "partitioning --solutions none,fsdp")
    assert list(rows) == ["none", "accelerate DDP", "fsdp", "torch fully_shard"]
    assert rows["none"]["loss"] == pytest.approx(rows["accelerate DDP"]["loss"], rel=1e-5)
    assert rows["fsdp"]["held"][0]["parameter_bytes"] < rows["none"]["held"][0]["parameter_bytes"]
    assert "× accelerate DDP; goal 1.0 ×" in capsys.readouterr().out


@pytest.mark.distributed
def test_shards_inside_tensor_groups_train_like_torchs_recipe(tmp_path: Path) -> None:
    rows = _measured(tmp_path, "two-levels")
    ours, torchs, optimizer, copies = rows.values()
    losses = [row["loss"] for row in (ours, torchs, optimizer, copies)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    held = ours["held"][0], copies["held"][0]
    for kind in ("parameter_bytes", "optimizer_state_bytes"):
        assert held[0][kind] < 0.55 * held[1][kind]


def test_utilisation_is_measured_beside_its_peers(tmp_path: Path) -> None:
    rows = _measured(tmp_path, "mfu --solutions eager")
    assert list(rows) == ["eager", *TABLES["mfu"].solutions["eager"].peers]
    assert all(0 < row["utilisation"] < 2 for row in rows.values())
    losses = [row["loss"] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3 if cpu_is_fast_at_bf16() else 1e-5)


def test_all_solutions_of_a_graph_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install 'rapidformer_templates[onnx-runtime]'")
    rows = _measured(tmp_path, "graph --solutions fp32,ORT")
    assert rows["ORT"]["loss"] == pytest.approx(rows["fp32"]["loss"], rel=1e-5)
    assert rows["fp32"]["ratio"] == 1
    assert "614.70" not in capsys.readouterr().out  # of a solution that was not asked for
