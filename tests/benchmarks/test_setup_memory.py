"""Rows of the table of building a model."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks.setup_memory import ENGINES, Comparison, measure, notes
from benchmarks.setup_memory_worker import Result


def test_rows_that_miss_the_goal_are_named() -> None:
    reached = Comparison("fsdp", "random", 50, Result(100, 165, 1.0), None)
    missed = Comparison("tensor", "pretrained", 50, Result(100, 166, 1.0), None)
    reference = Comparison("ddp", "random", 50, Result(400, 800, 1.0), None)
    assert notes([reached, reference]) == ["goal: at most the share and the largest part, and 10% more: reached"]
    assert notes([reached, missed, reference])[0].endswith("missed (not by tensor, pretrained)")


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize("first_step", [False, True])
def test_workers_build_their_shares(first_step: bool) -> None:
    options = argparse.Namespace(
        width=128, blocks=8, dtype="float32", engines=",".join(ENGINES), weights="pretrained", whole=False, repeats=1
    )
    options.first_step = first_step
    rows = {row.engine: row for row in measure(options)}
    assert rows.keys() == ENGINES.keys()
    parameters = rows["ddp"].shares.share
    assert parameters == 4 * (2 * 32_000 * 128 + 8 * (4 * 128 * 128 + 3 * 128 * (128 * 8 // 3) + 2 * 128) + 128)
    assert rows["hybrid"].shares.share == pytest.approx(parameters / 2, rel=0.05)
    for engine in ("fsdp", "tensor", "2x2", "zero-3"):
        assert rows[engine].shares.share == pytest.approx(parameters / 4, rel=0.1)
    assert rows["fsdp-int4"].shares.share < rows["fsdp"].shares.share
    assert all(row.shares.seconds > 0 for row in rows.values())
