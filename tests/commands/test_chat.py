"""``rapidformer chat`` at a terminal and from lines, and SFT, then DPO: peft and transformers have the same numbers."""

import io
import json
import math
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.errors import DataError
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.run.predictions import Conversation
from tests.support.chat_templates import WEATHER, template
from tests.support.messages import Says
from tests.support.preference_runs import pairs, words
from tests.support.texts import write_jsonl

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NEW = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """Save a small llama with long answers, and a tokenizer with a chat template."""
    torch.manual_seed(3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt_folder)
    tokenizer.chat_template = TEMPLATE
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=8192, initializer_range=0.3, eos_token_id=0, bos_token_id=0,
        )
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("chat") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reference(folder: Path, messages: list[dict[str, str]], new_tokens: int = 6, tools: Any = None) -> str:
    """Return the answer of transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(tokens[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.slow
def test_lines(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    first = reference(folder, said("the cat"))
    second = reference(folder, said("the cat", first.strip(), "a dog"))
    assert first != second
    for lines, wanted in (
        ("the cat\n\na dog\n", [first, second]),
        ("the cat\n/reset\nthe cat\n/exit\na dog\n", [first, first]),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main(["chat", str(folder), *NEW]) == 0
        assert capsys.readouterr().out == "".join(f"{text}\n" for text in wanted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    assert main(["chat", str(folder), *NEW, "--system", "be good"]) == 0
    system = {"role": "system", "content": "be good"}
    assert capsys.readouterr().out == reference(folder, [system, *said("the cat")]) + "\n"


@pytest.mark.slow
def test_tools(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template("qwen25", marked=False)
    tokenizer.save_pretrained(model)
    first = reference(model, said("the cat"), tools=[WEATHER])
    assert first != reference(model, said("the cat"))
    result = {"role": "tool", "content": "rain"}
    second = reference(model, [*said("the cat", first.strip()), result], tools=[WEATHER])
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER["function"]]), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n/tool rain\n"))
    assert main(["chat", str(model), *NEW, "--tools", str(tmp_path / "tools.json")]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    rows = [{"messages": said("the cat"), "tools": [WEATHER]}, {"messages": said("the cat")}]
    source, output = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    assert main(["predict", str(model), "--input", str(source), "--output", str(output), *NEW]) == 0
    predicted = [json.loads(line)["prediction"]["text"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert predicted == [first, reference(model, said("the cat"))]


def test_tools_that_cannot_be_read(folder: Path, tmp_path: Path, says: Says) -> None:
    for text in (None, "[", "[]", '[{"type": "function"}]'):
        if text is not None:
            (tmp_path / "tools.json").write_text(text, encoding="utf-8")
        says.command(f"chat {folder} --tools {tmp_path}/tools.json")


@pytest.mark.slow
def test_a_conversation_that_grows_too_long(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.config.max_position_embeddings = 80
    talk = Conversation(model, tokenizer, Generation(max_new_tokens=8), "be good")
    assert [talk.answer("the cat sees a tree", lambda piece: None) for _ in range(4)][-1] == 2
    assert talk.messages[0]["role"] == "system"
    assert [m["role"] for m in talk.messages[1:]] == ["user", "assistant"] * ((len(talk.messages) - 1) // 2)


@pytest.mark.slow
def test_lines_that_are_not_utf8(folder: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the café\n".encode("latin-1")), encoding="utf-8"))
    says.command(f"chat {folder} {' '.join(NEW)}")


def test_a_message_without_a_token(folder: Path, says: Says) -> None:
    bare = Tokenizer(BPE({"<pad>": 0, "a": 1}, []))  # all other characters are ignored
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, chat_template="{{ messages[-1]['content'] }}"
    )
    talk = Conversation(transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer, Generation())
    with says(DataError):
        talk.answer("日本", lambda piece: None)
    assert talk.messages == []


def _take_terminal() -> None:
    """Make the terminal the controlling one, and Ctrl-C work: a job in the background inherits that it is ignored."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command in a terminal."""

    def __init__(self, *words: str) -> None:
        own, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rapidformer_templates", "chat", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.own = own

    def until(self, pattern: str, seconds: float = 300) -> str:
        """Return the output until a pattern appears."""
        read, shown, end = b"", "", time.monotonic() + seconds
        while not re.search(pattern, shown):
            if time.monotonic() > end:
                raise TimeoutError(shown)
            if wait([self.own], 0.2):
                read += os.read(self.own, 4096)  # may end within a character
                shown = read.decode(errors="replace").replace("\r\n", "\n")
        return shown

    def type(self, text: str) -> None:
        os.write(self.own, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C at the prompt, as often as a person would.

        Python's readline notices a signal only while it waits for a key. It does not notice a signal that
        arrives just before, when the prompt or a letter has just been shown, until the end of the line.
        """
        for _ in range(100):
            self.type("\x03")
            with suppress(TimeoutError):
                self.until(pattern, 3)
                return
        raise TimeoutError("Ctrl-C is not seen")


@pytest.mark.longer
@pytest.mark.slow
def test_at_a_terminal(folder: Path) -> None:
    terminal = Terminal(str(folder), "--max-new-tokens", "4000")
    assert "/reset forgets the conversation" in terminal.until("> $")
    terminal.type("the cat\n")
    terminal.until(r"\w+ \w+ \w+")  # words of the answer, long before its end
    terminal.type("\x03")
    terminal.until(" …\n> $")  # an answer may contain "> " itself
    terminal.type("a dog")
    terminal.until("a dog$")
    terminal.interrupt("\n> $")  # the typed text is discarded
    for line, shown in (("/reset", "(forgotten)"), ("/help", "unknown command /help")):
        terminal.type(f"{line}\n")
        assert shown in terminal.until("\n> $")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")


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


@pytest.mark.longer
@pytest.mark.slow
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
