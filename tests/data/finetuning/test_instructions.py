"""Instructions with inputs and answers, as in Alpaca and Dolly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, write_jsonl

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ALPACA = [
    {"instruction": "say hello", "input": "", "output": "hello"},
    {"instruction": "say the number", "input": "the cat sees two", "output": "two"},
]
ASKED = ["<|user|>say hello\n<|assistant|>", "<|user|>say the number\n\nthe cat sees two\n<|assistant|>"]
ANSWERED = ["hello\n", "two\n"]

Load = Callable[..., Task]


@pytest.fixture
def load(tmp_path: Path, configure: Callable[..., RunConfig], gpt_folder: Path) -> Load:
    def make(rows: list[dict[str, Any]], task: str = "causal_lm", **flags: Any) -> Task:
        write_jsonl(tmp_path / "train.jsonl", rows)
        common = {
            "data_dir": str(tmp_path), "model_type": "gpt2", "tokenizer_path": str(gpt_folder), "seq_length": 96,
            "validation_fraction": 0.0, **TINY,
        }  # fmt: skip
        made = load_task(configure(task=task, **(common | flags)))
        made.tokenizer.chat_template = CHATML
        return made

    return make


def texts(task: Task) -> list[tuple[str, str]]:
    """Return (prompt, learned text) for each sample."""
    train = task.build_data().train
    assert train is not None
    found = []
    for sample in train:
        learned = sample["labels"] != IGNORED
        decoded = (task.tokenizer.decode(sample["input_ids"][part]) for part in (~learned, learned))
        found.append((next(decoded), next(decoded)))
    return found


def test_an_instruction_and_its_input_are_the_prompt(load: Load) -> None:
    assert texts(load(ALPACA)) == list(zip(ASKED, ANSWERED, strict=True))


@pytest.mark.parametrize("flags", [{"text_column": "instruction"}, {"label_column": "output"}])
def test_naming_one_of_the_columns_drops_no_other(load: Load, flags: dict[str, str]) -> None:
    assert texts(load(ALPACA, **flags)) == list(zip(ASKED, ANSWERED, strict=True))


def test_the_whole_text_of_a_row_does_not_win_over_its_instruction(load: Load) -> None:
    rows = [{**row, "text": "below is an instruction"} for row in ALPACA]
    assert texts(load(rows))[1] == (ASKED[1], ANSWERED[1])


def test_rows_of_dolly_and_a_system_prompt(load: Load) -> None:
    rows = [{"instruction": "say hello", "context": "in the house", "response": "hello", "system": "good and fine"}]
    assert texts(load(rows)) == [
        ("<|system|>good and fine\n<|user|>say hello\n\nin the house\n<|assistant|>", "hello\n")
    ]


def test_the_name_of_a_prompt_brings_its_completion(load: Load) -> None:
    task = load([{"prompt": "say", "completion": " hello"}], text_column="prompt")
    task.tokenizer.eos_token = None
    assert texts(task) == [("say", " hello")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": None, "output": "a"}, "the instruction is empty"),
        ({"instruction": "a", "output": " "}, "the answer is empty"),
        ({"instruction": "a", "output": "b", "input": 3}, "the input is of type int"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "earlier turns in 'history'"),
    ],
)
def test_rows_that_cannot_be_used(load: Load, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load([row]).build_data()
    assert caught.value.where == f"{tmp_path / 'train.jsonl'}:1"


def test_sequence_to_sequence_reads_the_instruction_too(load: Load, bert_folder: Path) -> None:
    task = load(ALPACA, "seq2seq_lm", model_type="t5", tokenizer_path=str(bert_folder))
    train = task.build_data().train
    assert train is not None
    sources = [task.tokenizer.decode(sample["input_ids"], skip_special_tokens=True) for sample in train]
    assert sources == ["say hello", "say the number the cat sees two"]
    with pytest.raises(DataError, match="the column 'input' holds int, not text"):
        load([{**ALPACA[0], "input": 3}], "seq2seq_lm", model_type="t5", tokenizer_path=str(bert_folder)).build_data()
