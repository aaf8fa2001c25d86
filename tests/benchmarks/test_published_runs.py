"""The comparison with published runs: rows become command lines, and each series has one vote."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from benchmarks import published_runs
from benchmarks.published_runs import command, kendall_tau, measured_seconds, predict_rows, weighted_median

with Path(published_runs.__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
    ROWS = {row["id"]: row for row in csv.DictReader(file)}


def test_a_row_becomes_the_layout_that_it_names() -> None:
    words = " ".join(command(ROWS["bloom-a100-054"], "FOLDER"))
    assert "--world-size 384 --local-world-size 8" in words
    assert "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12" in words
    assert "--pipeline-stages 7,7,7,7,7,7,6,6,6,6,6,6" in words  # 78 blocks
    assert words.endswith("--zero-1-memory-optimization --fp16 --checkpoint-activations")


def test_speeds_become_seconds() -> None:
    row = {"value": "1000", "global_batch": "16", "seq_length": "2000", "gpus": "8"}
    expected = {"step_seconds": 1000, "samples_per_second": 0.016, "tokens_per_second_per_gpu": 4}
    assert {metric: measured_seconds({**row, "metric": metric}) for metric in expected} == expected


def test_kendall_tau_counts_pairs_in_order() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)


def test_a_long_series_has_one_vote() -> None:
    values = [3.0, 1.0, 2.0, 7.0]
    assert weighted_median([values]) == weighted_median([value] for value in values) == statistics.median(values)
    assert weighted_median([[9.0] * 50, [1.0], [2.0]]) == 2


@pytest.mark.slow
def test_a_published_run_is_predicted() -> None:
    (one, other) = predict_rows([ROWS["hf-bert-005"], {**ROWS["hf-bert-005"], "precision": "fp8"}])
    assert abs(one["error"]) < 0.3
    assert other["refused"].startswith("not usable")
