"""Ways to save a few MB. The tests check what was written, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import saving
from benchmarks.__main__ import main
from benchmarks.saving import DISK, OURS, OURS_ASYNC, PAST_CACHE, Stalls, State
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.checkpoint import format as checkpoint


@pytest.mark.slow
def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["saving", "--gigabytes", "0.004", "--repeats", "2", "--folder", str(tmp_path / "disk")]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "saving.json").read_text())
    names = [DISK, PAST_CACHE, OURS, OURS_ASYNC, "torch.save", "torch.distributed.checkpoint", "safetensors"]
    assert list(result["seconds"]) == list(result["ratios"]) == names
    assert all(len(row) == 2 and min(row) > 0 for row in (*result["seconds"].values(), *result["ratios"].values()))
    assert result["ratios"][DISK] == [1, 1]
    assert len(result["stall_seconds"]) == len(result["copy_seconds"]) == 2
    assert min(result["stall_seconds_first"], *result["stall_seconds"], *result["copy_seconds"]) > 0
    assert 3e6 < result["bytes"] < 5e6
    assert (tmp_path / "saving.png").stat().st_size > 0
    assert list((tmp_path / "disk").iterdir()) == []
    shown = capsys.readouterr().out
    assert "× the disk's own write + fsync (median); goal 0.85 ×" in shown
    assert "× a copy of the same bytes (median); goal 1.2 ×" in shown


def test_ours_holds_the_state_of_a_training(tmp_path: Path) -> None:
    state = State(0.004)
    saving._save(state, tmp_path)
    reader = checkpoint.Reader(tmp_path / "step-1")
    for kind, tensors in state.tensors.items():
        assert reader.names(kind) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            assert reader.read(kind, name, (0,) * tensor.ndim, tensor.shape).equal(tensor)
    moments = {name.rpartition("/")[2] for name in state.tensors["optimizer"]}
    assert moments == {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.slow
def test_the_state_has_the_size_that_was_asked_for() -> None:
    parameters = sum(p.numel() for p in saving.bert(1.3).parameters())
    assert parameters * 12 == pytest.approx(1.3e9, rel=0.03)


def test_who_writes_less_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(RapidformerError, match=r"lazy wrote 1 of \d+ bytes, so it does different work"):
        saving._timed(tmp_path / "lazy", lambda path: _touch(path / "file"), State(0.004))


def _touch(path: Path) -> None:
    path.write_bytes(b"x")


def test_a_stall_is_compared_with_the_copy_beside_it() -> None:
    stalls = Stalls(None, None)  # type: ignore[arg-type]
    stalls.steps, stalls.copies = [0.3, 0.2], [0.2, 0.2]
    assert stalls.ratios() == pytest.approx([1.5, 1.0])
