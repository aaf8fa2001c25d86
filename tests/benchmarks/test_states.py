"""``benchmarks states``: bytes of real runs compared with their formulas, and the lines of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import states
from benchmarks.__main__ import main
from benchmarks.planner_worker import MODELS


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.deepspeed
def test_two_workers_hold_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    monkeypatch.setattr(states, "WORLDS", (2,))
    names = ("zero-2", "distributed-optimizer", "zero-2, tensor 2")
    monkeypatch.setattr(states, "WAYS", {name: states.WAYS[name] for name in names})
    deepspeed, distributed, tensor = states.measure(2)
    assert deepspeed["held"][2] == pytest.approx([2, 1, 6], abs=0.001)
    assert deepspeed["expected"][2] == 9
    # Norms stay in fp32. They are a thousandth of the model.
    assert distributed["held"][2] == pytest.approx([2, 2, 6], abs=0.01)
    assert distributed["expected"][2] == 10
    assert tensor["held"][1] == pytest.approx([2, 4, 12], abs=0.01)
    assert tensor["expected"][1] == 18


def test_the_worker_that_holds_most_is_told_and_missed_goals_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = sum(p.count for p in MODELS[states.MODEL].shapes("").all_parameters.values())

    def run(jobs: Sequence[tuple[str, Sequence[str]]], world: int) -> list[list[dict[str, Any]]]:
        ranks = [dict(zip(states.KINDS, (2 * count, count * rank, 8 * count), strict=True)) for rank in range(world)]
        return [[{"held": held | {"bucket_bytes": count // 2}} for held in ranks] for _ in jobs]

    monkeypatch.setattr(states, "run_in_groups", run)
    assert main(["states", "--workers", "2", "--output", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "states.json").read_text())["rows"]}
    assert rows.keys() == states.WAYS.keys()
    assert rows["zero-3"]["held"] == {"1": [2, 0, 8], "2": [2, 1, 8]}
    assert rows["zero-3"]["expected"] == {"1": 16, "2": 8}
    goal, buckets = states.notes([states._row("zero-2", {2: [dict.fromkeys(states.KINDS, 4.0)]})])
    assert goal == "zero-2: goal at most 10.00: missed"
    assert buckets == "buckets, not included: none"
