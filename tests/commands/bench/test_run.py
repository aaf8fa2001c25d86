"""``bench run`` and ``bench mfu``: what they measure and write, and the FLOPs of a model. No speed is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates.commands.bench import models
from rapidformer_templates.commands.bench.cli import SCALES, main
from rapidformer_templates.commands.bench.flops import training_flops
from rapidformer_templates.commands.bench.models import cpu_is_fast_at_bf16, fast_precision
from rapidformer_templates.commands.bench.run import figures_of
from tests.support.messages import Says
from tests.support.texts import write_jsonl

TINY = ["mfu", "--scale", "tiny", "--device", "cpu", "--turns", "2"]


@pytest.mark.slow
def test_one_configuration_is_measured(tmp_path: Path, bert_folder: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ({"text": f"line {i} says {i}", "label": i % 2} for i in range(40)))
    flags = (
        f"--task sequence_classification --model-type bert --num-layers 1 --hidden-size 16 --num-attention-heads 2"
        f" --seq-length 16 --data-dir {tmp_path} --data-name train --tokenizer-path {bert_folder} --lr 1e-3"
        " --micro-batch-size 4 --device cpu"
    ).split()
    assert main(["run", "--turns", "2", "--json", str(tmp_path / "run.json"), *flags]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["samples_per_second"] > 0
    assert len(result["seconds"]) == 2
    assert 0 < result["utilisation"] < 2
    assert result["plan"]["sizes"]["global_batch"] == 4
    assert result["flags"] == flags


def test_a_model_of_known_size_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--steps-a-turn", "2", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "mfu.json").read_text())
    # A GPT of 2 layers and width 32: blocks of 12 h² + 13 h, tables of 128 words and 16 positions, and the last norm.
    assert result["parameters"] == 2 * (12 * 32**2 + 13 * 32) + (128 + 16) * 32 + 2 * 32
    decoder = 6 * (2 * 12 * 32**2 + 128 * 32) + 12 * 2 * 32 * 16  # FLOPs of a token, with the tied head
    assert result["flops_a_step"] == pytest.approx(decoder * 16 * 2, rel=0.01)
    assert len(result["seconds"]) == 2
    assert 100 < result["peak_mb"] < 10_000
    assert 4 < result["loss"] < 6
    assert result["plan"]["precision"] == fast_precision("cpu")
    assert (tmp_path / "mfu.png").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "utilisation" in shown
    assert "wall time" not in shown  # the results of the run itself


@pytest.mark.slow
@pytest.mark.distributed
def test_several_workers_and_more_flags_are_measured(tmp_path: Path) -> None:
    more = ["--nproc-per-node", "2", "--fsdp-memory-optimization", "--micro-batch-size", "1"]
    command = [sys.executable, "-m", "rapidformer_templates", "bench", *TINY, *more, "--json", str(tmp_path / "f.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    result = json.loads((tmp_path / "f.json").read_text())
    assert len(result["seconds"]) == 2
    assert result["plan"]["sizes"]["world"] == result["plan"]["sizes"]["global_batch"] == 2
    assert "fsdp" in result["plan"]["switches"]


def test_the_warm_up_does_not_count_and_utilisation_is_that_of_each_turn() -> None:
    figures = figures_of([9.0, 9.0, 1.0, 2.0], [1.0, 1.0, 80.0, 80.0, 0.0], batch=4, flops=40.0)
    assert figures["samples_per_second"] == pytest.approx(8 / 3)
    assert figures["utilisation"] == pytest.approx(0.5)  # 40 / 1 / 80 and 40 / 2 / 40
    assert figures["seconds"] == [1.0, 2.0]
    assert figures_of([1.0] * 3, [1.0] * 4, 4, 0.0)["utilisation"] is None


@pytest.mark.parametrize(("instructions", "precision"), [({"avx512_bf16": True}, "bf16"), ({"avx2": True}, "fp32")])
def test_a_cpu_computes_in_bf16_where_it_has_instructions_for_it(
    instructions: dict[str, bool], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    monkeypatch.setattr(models, "cpu_is_fast_at_bf16", cpu_is_fast_at_bf16.__wrapped__)
    assert fast_precision("cpu") == precision


def test_the_published_models_have_their_parameters() -> None:
    assert set(models.SCALES) == set(SCALES)
    with torch.device("meta"):
        assert sum(p.numel() for p in models.SCALES["paper"].build().parameters()) == 1_313_722_368
        assert sum(p.numel() for p in models.SCALES["bert-base"].build().parameters()) == 110_106_428


@pytest.mark.parametrize(
    "words",
    ["partitioning --scale small", "mfu --scale huge", "calibrate --turns 3", "run --task causal_lm --epochs 3",
     "mfu --scale tiny --nothing"],
)  # fmt: skip
def test_mistakes_are_named(words: str, says: Says) -> None:
    says.command(f"bench {words}")


def test_a_decoder_s_flops_are_those_of_the_formula() -> None:
    """6 N + 12 L H S per token, where N excludes the table that is only looked up (PaLM, appendix B)."""
    layers, hidden, length, vocabulary, rows = 3, 64, 32, 512, 2
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=length, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.zeros(rows, length, dtype=torch.long)
    counted = training_flops(lambda: LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(config).parameters() if p.ndim > 1) - vocabulary * hidden
    expected = (6 * parameters + 12 * layers * hidden * length) * rows * length
    assert counted == pytest.approx(expected, rel=0.01)
