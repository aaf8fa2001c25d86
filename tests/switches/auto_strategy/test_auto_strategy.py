"""``--auto-strategy`` on a training command: its choice, the origin that the values show, and who receives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rapidformer_templates import Finetuner, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.run.configure import chosen_layout
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.switches.auto_strategy.command import NothingFits
from rapidformer_templates.system.launch import CHOSEN
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.plans import planned

FLAGS = [
    *("--auto-strategy", "--max-global-batch-size", "4", "--task", "pretraining", "--model-type", "gpt2"),
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--lr", "1e-3", "--train-iters", "2", "--device", "cpu", "--nproc-per-node", "2", "--no-save"),
]


@pytest.mark.slow
def test_the_best_layout_is_taken_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    template = Trainer([*FLAGS, "--zero-1-memory-optimization"])
    assert capsys.readouterr().err.startswith("best: --")
    sizes, values = template.plan.sizes, template.plan.values
    assert sizes.global_batch <= 4
    assert sizes.tensor * sizes.pipeline * sizes.data == 2
    assert values["--global-batch-size"] == {"value": sizes.global_batch, "origin": "auto-strategy"}
    assert values["--zero-1-memory-optimization"]["origin"] == "command line"
    assert "zero-1" in template.plan.switches

    # Workers that this process starts do not repeat the search.
    chosen = json.loads(chosen_layout(template.config)[CHOSEN])["values"]
    assert chosen["global_batch_size"] == [sizes.global_batch, "auto-strategy"]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **chosen_layout(template.config)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rapidformer_templates.switches.auto_strategy.command.search", None)
    worker = Trainer([*FLAGS, "--zero-1-memory-optimization"])
    assert worker.plan.sizes == template.plan.sizes


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "0.801")
    with says(NothingFits):
        Trainer([*FLAGS, "--zero-1-memory-optimization", "--micro-batch-size", "2"])
    with says(ConfigError):  # hooks that the search cannot see
        CausalJob(FLAGS)
    with says(Refused):
        Finetuner(FLAGS)


@pytest.mark.slow
def test_a_command_trains_in_the_layout_that_the_plan_puts_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "2")
    corpus, tokenizer, run = tmp_path / "corpus.jsonl", tmp_path / "tokenizer", tmp_path / "run"
    corpus.write_text("\n".join(json.dumps({"text": f"{n} red cats and {n * n} dogs"}) for n in range(300)))
    made = ["--input", str(corpus), "--type", "bpe", "--vocab-size", "300", "--output", str(tokenizer)]
    assert main(["data", "tokenizer", *made]) == 0
    model = f"--model-type gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --tokenizer-path {tokenizer}"
    batch = "--seq-length 32 --max-global-batch-size 4 --no-checkpoint-activations"
    common = f"--auto-strategy --device cpu {batch} {model}"
    best = planned(f"--world-size 1 {common}")["layouts"][0]
    train = f"--task pretraining --template Trainer --data-path {corpus} --data-cache-dir {tmp_path} --lr 1e-3"
    assert main([*train.split(), "--train-iters", "3", "--log-interval", "1", "--save", str(run), *common.split()]) == 0
    plan = json.loads((run / "plan.json").read_text())
    sizes = {name: plan["sizes"][name] for name in ("tensor", "pipeline", "data", "accumulation")}
    assert sizes == {name: best[name] for name in sizes}
    assert plan["sizes"]["micro_batch"] == best["micro_batch_size"]
    assert {"--micro-batch-size", "--global-batch-size"} <= {
        flag for flag, value in plan["values"].items() if value["origin"] == "auto-strategy"
    }
    assert [line["samples"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == [4, 8, 12]
