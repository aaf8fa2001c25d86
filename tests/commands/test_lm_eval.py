"""``rapidformer evaluate --lm-eval`` runs the harness on an export, with numbers that torch alone also finds."""

import importlib.util
import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from tests.support.messages import Says
from tests.support.preference_runs import make
from tests.support.texts import write_jsonl

TASK = """
task: animals
dataset_path: json
dataset_kwargs:
  data_files: {test: ROWS}
test_split: test
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{answer}}"
metric_list:
  - metric: perplexity
"""
ROWS = [{"text": text, "answer": answer} for text, answer in (("the cat", "sat"), ("a dog", "ran on"), ("the", "mat"))]


@pytest.fixture(params=["", "--lora-rank 2"])
def run(request: pytest.FixtureRequest, tmp_path: Path, gpt_folder: Path) -> Path:
    given = make(tmp_path / "data", gpt_folder, [{"text": "the cat sat"}] * 5)
    given.remove("--no-export-model")
    flags = f"--task causal_lm --micro-batch-size 2 {request.param}".split()
    Trainer([*flags, *given, "--save", str(tmp_path / "run")]).fit()
    return tmp_path / "run"


def perplexity(folder: Path) -> float:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    logs = []
    for row in ROWS:
        start = len(tokenizer(row["text"], add_special_tokens=False)["input_ids"])
        tokens = torch.tensor(tokenizer(f"{row['text']} {row['answer']}", add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            said = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        logs.append(said[start - 1 : -1].gather(1, tokens[start:, None]).sum().item())
    return math.exp(-sum(logs) / len(logs))


def test_the_numbers_are_those_of_the_export(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: make test-optional")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    task = tmp_path / "animals.yaml"
    task.write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    assert main(["evaluate", str(run), "--lm-eval", str(task), "--device", "cpu", "--micro-batch-size", "2"]) == 0
    (results,) = (run / "lm-eval").rglob("results_*.json")
    told = json.loads(results.read_text())["results"]["animals"]["perplexity,none"]
    folder = run / "export"
    if (folder / "adapter_config.json").is_file():
        assert main(["export", str(run), "--merge"]) == 0
        folder = run / "merged"
    assert told == pytest.approx(perplexity(folder), rel=1e-4)


@pytest.mark.parametrize("run", [""], indirect=True)
def test_flags_that_have_no_effect_are_refused(run: Path, says: Says) -> None:
    for more in ("--part test", "--text-column words"):
        says.command(f"evaluate {run} --lm-eval hellaswag {more}")


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The model arguments of each call of the harness, which is not run."""
    calls: list[dict[str, str]] = []

    def call(words: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        given = words[words.index("--model_args") + 1]
        calls.append(dict(pair.split("=", 1) for pair in given.split(",")))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(subprocess, "run", call)
    return calls


@pytest.mark.parametrize("run", ["--lora-rank 2"], indirect=True)
def test_adapters_are_evaluated_on_their_own_base(
    run: Path, tmp_path: Path, harness: list[dict[str, str]], says: Says
) -> None:
    file = run / "export/adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "revision": "v1"}))
    export, base = str(run / "export"), settings["base_model_name_or_path"]
    command = ["evaluate", str(run), "--lm-eval", "hellaswag"]
    assert main(command) == 0
    assert harness.pop() == {"pretrained": base, "revision": "v1", "peft": export, "tokenizer": export}
    assert main([*command, "--base", base]) == 0  # the revision belongs to a name on the hub
    assert harness.pop() == {"pretrained": base, "peft": export, "tokenizer": export}
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.transformer.wte.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    file.write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    says.command(f"evaluate {run} --lm-eval hellaswag")
    says.command(f"evaluate {run} --lm-eval hellaswag --base {tmp_path / 'other'}")
    assert not harness


@pytest.mark.parametrize("run", [""], indirect=True)
def test_the_type_is_that_of_other_commands(
    run: Path, harness: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", str(run), "--lm-eval", "hellaswag", "--mixed-precision"]
    assert main([*command, "--device", "cpu"]) == 0
    assert harness.pop()["dtype"] == "bfloat16"
    assert main([*command, "fp16", "--device", "cpu"]) == 0
    assert harness.pop()["dtype"] == "float16"
    monkeypatch.setattr("rapidformer_templates.planning.environment.detect_accelerator", lambda: "cuda")
    assert main(command) == 0
    assert harness.pop()["dtype"] == "float16"


@pytest.mark.parametrize("run", [""], indirect=True)
def test_converted_mixtures_are_refused(run: Path, harness: list[dict[str, str]], says: Says) -> None:
    config = run / "export/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "moe-gpt2"}))
    says.command(f"evaluate {run} --lm-eval hellaswag")
    assert not harness
