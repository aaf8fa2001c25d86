"""Predictions beside measurements: ``benchmarks planner`` with one real layout, and published runs."""

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner_worker, published_runs
from benchmarks.planner import EXPERTS, Case, Result, measure
from benchmarks.published_runs import command, predict_rows
from rapidformer_templates.switches.auto_strategy.layouts import Layout

ALONE = Case("bert", Layout(micro_batch=2, recompute="full"))


def _sharded(model: str, precision: str, **more: Any) -> Case:
    return Case(model, Layout(context=2, micro_batch=1, partitioning="fsdp", **more), precision)


SHARDED = {
    "most is alive in the backward of the last block": _sharded("gpt2", "fp32"),
    "most is alive in the backward of one of the first": _sharded("llama", "fp32", recompute="full"),
    "the gradients of the tables leave inside of groups": _sharded("llama", "bf16", recompute="full", shard_size=2),
}


ENGINES = {
    "DDP": Case("gpt2", Layout(data=2, accumulation=2)),
    "ZeRO-2": Case("gpt2", Layout(tensor=2, data=2, partitioning="zero-2"), "bf16"),
    "pipeline": Case("llama", Layout(pipeline=2, accumulation=4, recompute="full"), "bf16"),
    "interleaved stages": Case("gpt2", Layout(pipeline=2, accumulation=4, virtual=3)),
    "context": Case("llama", Layout(context=2)),
    "divided experts": Case("gpt2", Layout(data=2, experts=2, micro_batch=2), adapters=EXPERTS),
}


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Measure all cases at once, so that each number of workers starts only once."""
    return measure([ALONE, *SHARDED.values(), *ENGINES.values()])


@pytest.fixture
def result(results: list[Result]) -> Result:
    return results[0]


@pytest.mark.distributed
def test_a_real_run_holds_what_was_predicted(result: Result) -> None:
    assert result.exact
    assert abs(result.error) < 0.01
    assert result.would_fit
    assert result.allocator == pytest.approx(result.measured, rel=0.005)


@pytest.mark.distributed
@pytest.mark.parametrize("number", range(1, 1 + len(SHARDED)), ids=list(SHARDED))
def test_shards_of_divided_sequences_hold_what_was_predicted(number: int, results: list[Result]) -> None:
    found = results[number]
    assert found.exact
    assert abs(found.error) < 0.01


@pytest.mark.distributed
def test_engines_on_fake_tensors_need_what_real_runs_need(results: list[Result]) -> None:
    errors = {result.case.name: result.engine_error for result in results}
    assert not [error for error in errors.values() if error is None]
    assert {name: error for name, error in errors.items() if abs(error or 0) > 0.015} == {}


def test_an_engine_on_fake_tensors_needs_what_a_real_run_needs() -> None:
    case = Case("gpt2", Layout(micro_batch=2, accumulation=2))
    real = planner_worker.measure(case.model, 1, case.flags)
    memory = case.on_fake_tensors()
    assert memory is not None
    held = {"parameter_bytes": memory.parameters, "optimizer_state_bytes": memory.optimizer}
    assert {kind: real["held"][kind] for kind in held} == held
    # The real run also holds its batches.
    assert 0 <= max(real["peaks"]) - memory.peak < 100_000


with Path(published_runs.__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
    ROWS = {row["id"]: row for row in csv.DictReader(file)}


def test_a_row_becomes_the_layout_that_it_names() -> None:
    words = " ".join(command(ROWS["bloom-a100-054"], "FOLDER"))
    assert "--world-size 384 --local-world-size 8" in words
    assert "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12" in words
    assert "--pipeline-stages 7,7,7,7,7,7,6,6,6,6,6,6" in words  # 78 blocks
    assert words.endswith("--zero-1-memory-optimization --fp16 --checkpoint-activations")


def test_a_published_run_is_predicted() -> None:
    (one, other) = predict_rows([ROWS["hf-bert-005"], {**ROWS["hf-bert-005"], "precision": "fp8"}])
    assert abs(one["error"]) < 0.3
    assert other["refused"].startswith("not usable")
