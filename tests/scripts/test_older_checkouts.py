"""The scripts that compare this checkout with an older one, and a resumed run with the rest of an earlier one."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.compare_older import main
from scripts.resume_older import compare
from tests.support.manual import ROOT


def _write(folder: Path, run: str, weight: torch.Tensor, losses: list[float]) -> None:
    checkpoint = folder / run / "checkpoints/step-4"
    checkpoint.mkdir(parents=True)
    save_file({"w": weight[:1].clone(), "w#1": weight[1:].clone()}, checkpoint / "weights.safetensors")
    boxes = [["weights.safetensors", "w", [0, 0]], ["weights.safetensors", "w#1", [1, 0]]]
    index = {"weights": {"w": {"shape": list(weight.shape), "boxes": boxes}}, "optimizer": {}}
    (checkpoint / "index.json").write_text(json.dumps(index))
    (folder / f"{run}.jsonl").write_text("".join(json.dumps([loss, 1.0]) + "\n" for loss in losses))


@pytest.mark.parametrize(
    ("change", "losses", "difference"), [(0, [2.0, 1.0], 0), (0.5, [2.0, 1.0], 0.5), (0, [2.0, 1.25], 0.25)]
)
def test_any_difference_is_found(tmp_path: Path, change: float, losses: list[float], difference: float) -> None:
    weight = torch.arange(6.0).view(3, 2)
    _write(tmp_path, "older", weight, [4.0, 3.0, 2.0, 1.0])
    _write(tmp_path, "resumed", weight + torch.tensor([[0.0], [change], [0.0]]), losses)
    assert compare(tmp_path) == difference


def test_a_benchmark_of_both_checkouts_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), "--turns", "1", "fused-loss", "--vocabulary", "503", "--hidden", "64", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ways \[fused\] peak_mb: ([\d.]+) -> \1 \(1\.00 ×\)$", shown, flags=re.MULTILINE)
