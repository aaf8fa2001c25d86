"""The table of building a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.setup_memory import notes


def test_rows_that_miss_the_goal_are_named() -> None:
    reached = {"engine": "fsdp", "weights": "random", "relative": 1.1}
    missed = {"engine": "tensor", "weights": "pretrained", "relative": 1.11}
    reference = {"engine": "ddp", "weights": "random", "relative": 1.9}
    assert notes([reached, reference]) == ["goal: at most the share and the largest part, and 10% more: reached"]
    assert notes([reached, missed, reference])[0].endswith("missed (not by tensor, pretrained)")


@pytest.mark.longer
@pytest.mark.distributed
def test_a_worker_holds_its_share(tmp_path: Path) -> None:
    words = "setup-memory --width 64 --blocks 2 --engines ddp,fsdp --weights pretrained --json"
    assert main([*words.split(), str(tmp_path / "f.json")]) == 0
    whole, share = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert share["share"] == pytest.approx(whole["share"] / 4, rel=0.01)
    assert whole["largest"] == 32_000 * 64 * 4  # an embedding
