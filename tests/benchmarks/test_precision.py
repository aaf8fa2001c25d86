"""The benchmark of 16-bit weights. The tests never check how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import optimizers, precision
from benchmarks.__main__ import main
from benchmarks.texts import docstrings


@pytest.mark.longer
@pytest.mark.slow
def test_ways_to_keep_weights_are_compared_on_real_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "HELD_OUT", 8)
    monkeypatch.setattr(optimizers, "docstrings", lambda longest: docstrings(longest, 300))
    assert main(["precision", *["--steps", "12", "--layers", "1", "--hidden", "64"], "--output", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "precision.json").read_text())["precision"]}
    kinds = {name: (row["weights"], row["gradients"], row["optimizer"]) for name, row in rows.items()}
    assert kinds.pop("fp32") == kinds.pop("bf16, fp32 weights kept") == kinds.pop("fp16, fp32 weights kept")
    norms = 5 * 64 * 2 / (256 * 64 + 128 * 64 + 12 * 64**2 + 13 * 64 + 2 * 64)  # their share; they stay fp32
    for name, (weights, gradients, optimizer) in kinds.items():
        assert weights == pytest.approx(2 + 2 * norms, rel=0.01), name
        assert gradients == pytest.approx(weights if "gradients in bf16" in name else 4, rel=0.01), name
        assert optimizer == pytest.approx(12 - 4 * norms, rel=0.01), name
    assert all(row["over_fp32"] == pytest.approx(1, abs=0.01) for row in rows.values())
    assert len({row["loss"] for row in rows.values()}) > 3  # the runs differ
