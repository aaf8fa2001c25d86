"""SFT with adapters, then DPO with adapters: commands, peft and transformers have the same numbers at every step."""

from __future__ import annotations

import io
import json
import math
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rapidformer_templates.commands.main import main
from rapidformer_templates.run.folder import read_metrics
from tests.support.preference_runs import pairs, words
from tests.support.texts import write_jsonl

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
from peft import AutoPeftModelForCausalLM

pytestmark = pytest.mark.slow

TRAIN = "--lora-rank 4 --lr 0.05 --train-iters 3 --micro-batch-size 4 --seq-length 48 --device cpu --log-interval 1"


class Desk:
    """Calls commands, and returns what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder

    def call(self, words: str, status: int = 0) -> str:
        self.capsys.readouterr()
        with mock.patch("sys.stdin", io.StringIO("the cat sleeps\n")):
            assert main(shlex.split(words)) == status, self.capsys.readouterr().err
        told = self.capsys.readouterr()
        return told.err if status else told.out

    def evaluate(self, words: str) -> dict[str, float]:
        metrics: dict[str, float] = json.loads(self.call(f"evaluate {words} --json"))
        return metrics

    def train(self, task: str, start: Path, save: str, status: int = 0) -> str:
        data = f"--data-dir {self.folder / task} --pretrained-model-name-or-path {start}"
        return self.call(f"--task {task} {data} {TRAIN} --save {self.folder / save}", status)

    def metrics(self, save: str) -> dict[str, float]:
        summary = json.loads((self.folder / save / "summary.json").read_text())
        return {name: pytest.approx(value, rel=1e-5, abs=1e-7) for name, value in summary["metrics"].items()}


def _write(folder: Path, tokenizer: Path) -> Path:
    """Save a llama, conversations and preferences, and return the folder of the llama."""
    chats = [
        {"messages": [{"role": "user", "content": words(3, i)}, {"role": "assistant", "content": words(4, 40 + i)}]}
        for i in range(12)
    ]
    for task, rows in (("causal_lm", chats), ("preference", pairs(12))):
        (folder / task).mkdir()
        write_jsonl(folder / task / "train.jsonl", rows)
        write_jsonl(folder / task / "valid.jsonl", rows[:5])
    used = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(used), initializer_range=0.2, bos_token_id=0, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    used.save_pretrained(folder / "base")
    return folder / "base"


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(torch.arange(3, 30)[None]).logits
    return logits


def _assert_same(run: Path) -> torch.Tensor:
    """Assert that peft and transformers read one model from the adapters and from the merged folder."""
    adapters, merged = str(run / "export"), run / "merged"
    logits = _logits(AutoPeftModelForCausalLM.from_pretrained(adapters))
    torch.testing.assert_close(_logits(AutoModelForCausalLM.from_pretrained(adapters)), logits)
    torch.testing.assert_close(_logits(AutoModelForCausalLM.from_pretrained(merged)), logits, rtol=1e-4, atol=1e-5)
    return logits


def test_from_sft_to_dpo(tmp_path: Path, gpt_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk, base = Desk(capsys, tmp_path), _write(tmp_path, gpt_folder)
    sft, dpo = tmp_path / "sft", tmp_path / "dpo"
    desk.train("causal_lm", base, "sft")
    assert desk.evaluate(f"{sft}") == desk.metrics("sft")

    # New adapters need the merged model in a folder. The error has the command that writes it.
    error = desk.train("preference", sft / "export", "dpo", status=2)
    assert f"rapidformer export {sft} --merge; then --pretrained-model-name-or-path {sft / 'merged'}" in error
    desk.call(f"export {sft} --merge")
    valid = f"--task causal_lm --data-dir {tmp_path / 'causal_lm'} --data-name valid --seq-length 48"
    assert desk.evaluate(f"{sft / 'merged'} {valid}") == desk.metrics("sft")
    after_sft = _assert_same(sft)

    desk.train("preference", sft / "merged", "dpo")
    first = read_metrics(dpo / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)  # the reference is the model that SFT has trained
    assert desk.evaluate(f"{dpo}") == desk.metrics("dpo")
    desk.call(f"export {dpo} --merge")
    assert desk.evaluate(f"{dpo / 'merged'}") == desk.metrics("dpo")
    after_dpo = _assert_same(dpo)
    assert (after_dpo - after_sft).abs().max() > 0.1
    assert (after_sft - _logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1

    # The answers of chat are those that transformers generates.
    tokenizer, model = (
        AutoTokenizer.from_pretrained(dpo / "export"),
        AutoPeftModelForCausalLM.from_pretrained(dpo / "export"),
    )
    talk = [{"role": "user", "content": "the cat sleeps"}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    expected = tokenizer.decode(answer, skip_special_tokens=True).strip()
    for folder in (dpo, dpo / "merged"):
        assert desk.call(f"chat {folder} --max-new-tokens 6").strip() == expected

    # If the base moves, it is both the model below the adapters and the reference.
    (sft / "merged").rename(tmp_path / "moved")
    assert desk.evaluate(f"{dpo} --base {tmp_path / 'moved'}") == desk.metrics("dpo")
