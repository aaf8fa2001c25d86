"""``rapidformer plan --engine-memory``: the plan's engine runs on tensors without data, and its memory is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rapidformer_templates.commands.main import main
from tests.support.selection import by_default

TINY = "--model-type gpt2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --device cpu"
BATCH = "--world-size 4 --micro-batch-size 2 --global-batch-size 16"
ENGINES = [
    "--tensor-model-parallel-size 2 --use-distributed-optimizer",  # buckets leave after the peak of the activations
    "--num-experts 4 --expert-model-parallel-size 2",  # DDP's buckets are without the experts
    "--tensor-model-parallel-size 2 --mixed-precision bf16",
    "",
    "--fsdp-memory-optimization --mixed-precision bf16",
    "--pipeline-model-parallel-size 2",
    "--torch-compile aot_eager",  # left out by both
]
KEPT = ("parameters", "gradients", "optimizer")


def prediction(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main(["plan", *f"{TINY} {BATCH} --json {flags}".split()]) == 0
    predicted: dict[str, Any] = json.loads(capsys.readouterr().out)["prediction"]
    return predicted


@pytest.mark.parametrize("flags", by_default(ENGINES[:1], ENGINES))
def test_the_engine_agrees_with_the_rules(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are compared with real runs elsewhere: benchmarks/planner.py, and test_own_hooks.py for the engine."""
    by_engine = prediction(capsys, f"{flags} --engine-memory")
    by_rules = prediction(capsys, f"{flags} --tokens 1M")
    assert (by_engine["memory_from"], by_rules["memory_from"]) == ("engine", "rules")
    engine, rules = by_engine["memory_gb"], by_rules["memory_gb"]
    assert [engine[name] for name in KEPT] == pytest.approx([rules[name] for name in KEPT], abs=2e-6)
    assert engine["total"] == pytest.approx(rules["total"], rel=0.03)
    assert by_engine["step_seconds"] == by_rules["step_seconds"]


def test_the_text_says_where_the_memory_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *f"{TINY} --engine-memory".split()]) == 0
    assert "per worker, including the allowance, from a run of its engine on tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--zero-2-memory-optimization --template Trainer", "DeepSpeed's engine needs values"),
        ("--auto-strategy", "--engine-memory predicts one layout"),
    ],
)
def test_what_cannot_run_is_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *f"{TINY} {BATCH} --engine-memory {flags}".split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "help" in error
