"""Instructions with inputs and answers, as in Alpaca and Dolly."""

from __future__ import annotations

from typing import Any

import pytest

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import Load

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


@pytest.fixture
def load(load: Load) -> Load:
    def make(rows: list[dict[str, Any]], task: str = "causal_lm", **flags: Any) -> Task:
        made = load(task, rows, seq_length=96, **flags)
        made.tokenizer.chat_template = CHATML
        return made

    return make


def texts(task: Task) -> list[tuple[str, ...]]:
    """Return (prompt, learned text) for each sample."""
    found = []
    for sample in task.build_data().train or ():  # type: ignore[attr-defined]
        learned = sample["labels"] != IGNORED
        found.append(tuple(task.tokenizer.decode(sample["input_ids"][part]) for part in (~learned, learned)))
    return found


@pytest.mark.parametrize("flags", [{}, {"text_column": "instruction"}, {"label_column": "output"}])
def test_an_instruction_and_its_input_are_the_prompt(load: Load, flags: dict[str, str]) -> None:
    """Naming one of the columns drops no other, and the whole text of a row does not win over its instruction."""
    for more in ({}, {"text": "below is an instruction"}):
        assert texts(load([row | more for row in ALPACA], **flags)) == list(zip(ASKED, ANSWERED, strict=True))


def test_rows_of_dolly_and_a_system_prompt(load: Load) -> None:
    rows = [{"instruction": "say hello", "context": "in the house", "response": "hello", "system": "good and fine"}]
    assert texts(load(rows)) == [
        ("<|system|>good and fine\n<|user|>say hello\n\nin the house\n<|assistant|>", "hello\n")
    ]


def test_the_name_of_a_prompt_brings_its_completion(load: Load) -> None:
    task = load([{"prompt": "say", "completion": " hello"}], text_column="prompt")
    task.tokenizer.eos_token = None
    assert texts(task) == [("say", " hello")]


BAD: dict[str, dict[str, Any]] = {
    "no instruction": {"instruction": None, "output": "a"},
    "no answer": {"instruction": "a", "output": " "},
    "a number": {"instruction": "a", "output": "b", "input": 3},
    "earlier turns": {"instruction": "a", "output": "b", "history": [["c", "d"]]},
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_used(load: Load, name: str, says: Says) -> None:
    with says(DataError):
        load([BAD[name]]).build_data()


def test_sequence_to_sequence_reads_the_instruction_too(load: Load, says: Says) -> None:
    task: Any = load(ALPACA, "seq2seq_lm")
    sources = [task.tokenizer.decode(s["input_ids"], skip_special_tokens=True) for s in task.build_data().train]
    assert sources == ["say hello", "say the number the cat sees two"]
    with says(DataError):
        load([{**ALPACA[0], "input": 3}], "seq2seq_lm").build_data()
