"""Ways to train a small model on real text. The tests never check how long anything took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import small_gpt
from benchmarks.__main__ import main
from benchmarks.small_gpt import FUSED, PLAIN, WHOLE
from benchmarks.texts import docstrings


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_gpt, "HELD_OUT", 8)
    monkeypatch.setattr(small_gpt, "docstrings", lambda longest: docstrings(longest, 300))


def _rows(folder: Path, words: str) -> dict[str, dict[str, Any]]:
    question, *flags = words.split()
    assert main([question, *flags, "--output", str(folder)]) == 0
    assert (folder / f"{question}.png").stat().st_size > 0
    return {row["name"]: row for row in json.loads((folder / f"{question}.json").read_text())["ways"]}


@pytest.mark.longer
def test_ways_to_keep_weights_are_compared(tmp_path: Path, few: None) -> None:
    rows = _rows(tmp_path, "precision --steps 12 --layers 1 --hidden 64")
    kinds = {name: (row["weights"], row["gradients"], row["optimizer"]) for name, row in rows.items()}
    assert kinds.pop("fp32") == kinds.pop("bf16, fp32 weights kept") == kinds.pop("fp16, fp32 weights kept")
    norms = 5 * 64 * 2 / (256 * 64 + 128 * 64 + 12 * 64**2 + 13 * 64 + 2 * 64)  # their share; they stay fp32
    for name, (weights, gradients, optimizer) in kinds.items():
        assert weights == pytest.approx(2 + 2 * norms, rel=0.01), name
        assert gradients == pytest.approx(weights if "gradients in bf16" in name else 4, rel=0.01), name
        assert optimizer == pytest.approx(12 - 4 * norms, rel=0.01), name
    assert all(row["loss_ratio"] == pytest.approx(1, abs=0.01) for row in rows.values())
    assert len({row["loss"] for row in rows.values()}) > 3  # the runs differ


@pytest.mark.slow
def test_optimizers_are_compared(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_gpt, "available", lambda: (["adamw_torch_fused", "adamw_anyprecision", "muon"], ["one"]))
    rows = _rows(tmp_path, "optimizers --steps 12 --layers 1 --hidden 64")
    assert rows["adamw_torch_fused"]["optimizer"] == pytest.approx(8, abs=0.01)
    assert rows["adamw_anyprecision"]["optimizer"] == pytest.approx(4, abs=0.01)
    assert 4 < rows["muon"]["optimizer"] < 8
    assert rows["adamw_torch_fused"]["loss_ratio"] == 1.0
    assert all(row["loss"] < 5.5 for row in rows.values())  # ln 256 = 5.55
    assert "goal: loss within 1.0% of adamw_torch_fused" in capsys.readouterr().out


@pytest.mark.longer
def test_adapters_are_compared_with_the_whole_model(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    ways = {name: small_gpt.ADAPTERS[name] for name in (WHOLE, "LoRA", "QLoRA, int4")}
    monkeypatch.setattr(small_gpt, "ADAPTERS", ways)
    whole, lora, four = _rows(tmp_path, "adapters --steps 12 --layers 1 --hidden 64").values()
    assert whole["trained"] == whole["parameters"] == lora["parameters"] - lora["trained"]
    assert lora["trained"] == four["trained"] < whole["trained"]
    assert four["held_mb"] < lora["held_mb"] < whole["held_mb"]
    assert all(2 < row["loss"] < 5.5 for row in (whole, lora, four))


def test_fused_loss_needs_less_and_loses_nothing(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "fused-loss --vocabulary 5003 --hidden 64 --layers 1 --steps 1")
    assert rows[FUSED]["loss"] == pytest.approx(rows[PLAIN]["loss"], rel=1e-6)
    # The planner counts 8 bytes per word of a token, for its log probability and the gradient. A logit may add 4 more.
    predicted = json.loads((tmp_path / "fused-loss.json").read_text())["predicted_saving_mb"]
    assert predicted <= rows[PLAIN]["peak_mb"] - rows[FUSED]["peak_mb"] <= 1.5 * predicted
