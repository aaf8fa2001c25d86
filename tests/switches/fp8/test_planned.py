"""Layers and memory that the planner predicts for fp8, compared with runs of the engine on tensors without data."""

import json

import pytest

from rapidformer_templates.commands.main import main

pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'rapidformer_templates[torchao]'")

LLAMA = (
    "--device-kind h100-80gb --world-size 1 --micro-batch-size 2 --global-batch-size 2 --mixed-precision bf16"
    " --checkpoint-activations --tokens 1B"
    " --model-type llama --hidden-size 4096 --num-attention-heads 32 --num-layers 4 --seq-length 4096"
)


def _prediction(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, dict[str, float]]:
    assert main(["plan", "--json", *f"{LLAMA} {flags}".split()]) == 0
    prediction: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)["prediction"]
    return prediction


def test_casts_count_in_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found, engine, without = (
        _prediction(capsys, flags)["memory_gb"]["total"]
        for flags in ("--fp8-recipe rowwise", "--fp8-recipe rowwise --engine-memory", "")
    )
    assert without < engine <= found <= 1.05 * engine


def test_the_plan_counts_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block of a Llama has seven."""
    counted = _prediction(capsys, "--fp8-recipe rowwise --fp8-filter down_proj")["fp8_layers"]
    assert counted == {"fp8": 24, "--fp8-filter": 4}
    assert main(["plan", *f"{LLAMA} --fp8-recipe rowwise --fp8-filter down_proj".split()]) == 0
    assert "fp8: 24 of 28 linear layers of the blocks multiply in it" in capsys.readouterr().out
