"""Rows of the table of building a model."""

from __future__ import annotations

from benchmarks.setup_memory import Comparison, notes
from benchmarks.setup_memory_worker import Result


def test_rows_that_miss_the_goal_are_named() -> None:
    reached = Comparison("fsdp", "random", 50, Result(100, 165, 1.0), None)
    missed = Comparison("tensor", "pretrained", 50, Result(100, 166, 1.0), None)
    reference = Comparison("ddp", "random", 50, Result(400, 800, 1.0), None)
    assert notes([reached, reference]) == ["goal: at most the share and the largest part, and 10% more: reached"]
    assert notes([reached, missed, reference])[0].endswith("missed (not by tensor, pretrained)")
