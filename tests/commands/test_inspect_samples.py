"""``rapidformer data inspect --task``: what it marks is what a run learns."""

import re
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.commands.main import main
from tests.support.chat_templates import CONVERSATIONS, said, template, tokenizer_with
from tests.support.messages import Says
from tests.support.texts import write_jsonl

ROWS = [CONVERSATIONS["tool call"], {"messages": said("one", "two", "three", "four 🐶")}]
SIZES = {"model_type": "gpt2", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 1000}


@pytest.fixture
def tokenizer(gpt_folder: Path, tmp_path: Path) -> Any:
    tokenizer = tokenizer_with(gpt_folder, tmp_path / "tokenizer")
    tokenizer.chat_template = template("qwen25", marked=False)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


def _words(folder: Path, *more: str) -> list[str]:
    flags = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    places = ["--data-dir", str(folder), "--tokenizer-path", str(folder / "tokenizer"), "--validation-fraction", "0"]
    return ["data", "inspect", *flags, *places, *more]


def _marked(text: str) -> list[str]:
    return re.findall(r"⟦(.*?)⟧", text, re.DOTALL)


CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": null}}\n</tool_call><|im_end|>\n'


@pytest.mark.parametrize("flags", ["", "--streaming --shuffle-buffer 0 --train-iters 3", "--pack-sequences"])
def test_conversations(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    show = "1" if flags == "--pack-sequences" else "2"
    assert main(_words(tmp_path, "--task", "causal_lm", "--show", show, *flags.split())) == 0
    shown = capsys.readouterr().out
    texts = [tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False) for row in ROWS]
    plain = re.sub("[⟦⟧]", "", shown)
    assert all(text in plain for text in texts)
    assert sorted(_marked(shown)) == sorted([CALLED, "It rains.<|im_end|>\n", "two<|im_end|>\n", "four 🐶<|im_end|>\n"])
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    learned = sum(len(tokenizer(text)["input_ids"]) for text in _marked(shown))
    if not flags:
        assert shown.startswith(
            f"2 samples, {sum(lengths)} tokens, {learned} of them learned ({learned / sum(lengths):.1%})"
        )
        assert f"sample 1: {lengths[0]} tokens, " in shown
    assert ("─" * 40 in shown) == (flags == "--pack-sequences")


def test_preferences_and_plain_text(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = said("hello", "world")
    rows = [{"chosen": talk, "rejected": [*talk[:1], {"role": "assistant", "content": "dog"}]}]
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert main(_words(tmp_path, "--task", "preference")) == 0
    shown = capsys.readouterr().out
    assert _marked(shown) == ["world<|im_end|>\n", "dog<|im_end|>\n"]
    assert "sample 1 (rejected): " in shown
    write_jsonl(tmp_path / "train.jsonl", [{"text": "hello world"}])
    assert main(_words(tmp_path, "--task=causal_lm")) == 0
    first, *rest = tokenizer("hello world<|endoftext|>")["input_ids"]
    assert f"{tokenizer.decode([first])}⟦{tokenizer.decode(rest)}⟧" in capsys.readouterr().out


def test_colours_of_a_terminal(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS[1:])
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    (tmp_path / "run.yaml").write_text("task: causal_lm\n", encoding="utf-8")
    assert main(_words(tmp_path, "--config", str(tmp_path / "run.yaml"))) == 0
    shown = capsys.readouterr().out
    assert "⟦" not in shown
    assert re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown) == ["two<|im_end|>", "four 🐶<|im_end|>"]


def test_mistakes(tokenizer: Any, tmp_path: Path, says: Says) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    for more in (
        ["--task", "causal_lm", "--tools-column", "abilities"],
        ["--task", "masked_lm"],
        ["--task", "causal_lm", "--tokenizer-path", "./nowhere", "--data-name", "none"],
        ["--task", "sequence_classification", "--tools-column", "tools"],
    ):
        says.command(" ".join(_words(tmp_path, *more)))
