"""Rows without a token, without a value, or with a wrong type: what works, and what is an error with file and line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.finetuning.tables import read_part
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, write_jsonl

Make = Callable[..., Task]
NO_TOKEN = "the text in column '{}' has no token"
LONG = "the cat " * 200
ANSWERED = {"role": "assistant", "content": "a"}


@pytest.fixture
def make(configure: Callable[..., RunConfig], bert_folder: Path, gpt_folder: Path, tmp_path: Path) -> Make:
    def task(kind: str, architecture: str, row: dict[str, Any], tokenizer: str) -> Task:
        write_jsonl(tmp_path / "test.jsonl", [row])
        folder = str({"gpt": gpt_folder, "bert": bert_folder, "bare": tmp_path / "bare"}[tokenizer])
        if tokenizer == "bare":  # it has no token for unknown characters
            known = Tokenizer(BPE({"<pad>": 0, "a": 1}, []))
            PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>").save_pretrained(folder)
        flags = {"task": kind, "model_type": architecture, "tokenizer_path": folder, "seq_length": 24}
        made = load_task(configure(**flags, **TINY, data_dir=str(tmp_path), max_eval_samples=1))
        made.load_label_state({"labels": ["O", "B-x"], "problem": "single_label_classification"})
        return made

    return task


BERT, GPT = ("bert", "bert"), ("gpt2", "gpt")
REFUSED: Mapping[str, tuple[str, tuple[str, str], dict[str, Any], tuple[str | None, str | None]]] = {
    # name: (task, (architecture, tokenizer), row, errors of evaluation and prediction; None: it works)
    "no token": (
        "sequence_classification", GPT, {"text": "", "label": "O"},
        ("the text in column 'text' is empty", NO_TOKEN.format("text")),
    ),
    "an empty text": (
        "sequence_classification", BERT, {"text": " ", "label": "O"}, ("the text in column 'text' is empty", None),
    ),
    "an empty list of words": (
        "token_classification", BERT, {"tokens": [], "tags": []}, ("the text in column 'tokens' is empty", None),
    ),
    "a long text": ("sequence_classification", BERT, {"text": LONG, "label": "O"}, (None, None)),
    "no label": (
        "sequence_classification", BERT, {"text": "a", "label": None}, ("the label in column 'label' is empty", None),
    ),
    "an unknown label": ("sequence_classification", BERT, {"text": "a", "label": "x"}, ("unknown label 'x'", None)),
    "no text": (
        "sequence_classification", BERT, {"text": None, "label": "O"},
        ("the column 'text' is empty", "the column 'text' is empty"),
    ),
    "no word": (
        "token_classification", BERT, {"tokens": ["a", None], "tags": ["O", "O"]},
        ("a word in column 'tokens' is empty", "a word in column 'tokens' is empty"),
    ),
    "a number for words": (
        "token_classification", BERT, {"tokens": 5, "tags": ["O"]},
        ("the column 'tokens' holds 5", "the column 'tokens' holds 5"),
    ),
    "a number for tags": (
        "token_classification", BERT, {"tokens": ["a"], "tags": 3}, ("the column 'tags' holds 3", None),
    ),
    "no words": ("token_classification", GPT, {"tokens": ["a"], "tags": ["O"]}, (None, None)),
    "a word of no token": ("token_classification", BERT, {"tokens": ["\u200b", "a"], "tags": ["O", "O"]}, (None, None)),
    "an empty line": (
        "causal_lm", GPT, {"text": ""}, ("no text has a token to predict from another", "the text is empty"),
    ),
    "a prompt of no token": (
        "causal_lm", ("gpt2", "bare"), {"text": "日本"},
        ("no text has a token to predict from another", "the prompt has no token"),
    ),
    "a long prompt": ("causal_lm", GPT, {"text": LONG * 9}, (None, "the prompt has")),
    "no message": (
        "causal_lm", GPT, {"messages": []}, ("the conversation has no message", "the messages has no message"),
    ),
    "no source": (
        "seq2seq_lm", ("t5", "gpt"), {"source": "", "target": "a"},
        (NO_TOKEN.format("source"), NO_TOKEN.format("source")),
    ),
    "no target": ("seq2seq_lm", ("t5", "gpt"), {"source": "a", "target": ""}, (NO_TOKEN.format("target"), None)),
    "a hidden word of none": ("masked_lm", BERT, {"text": ""}, (None, "there is no [MASK] within the first 24 tokens")),
    "an empty context": (
        "question_answering", BERT, {"question": "", "context": "", "answers": {"text": [], "answer_start": []}},
        (None, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_odd_rows(case: str, make: Make, tmp_path: Path) -> None:
    kind, (architecture, tokenizer), row, said = REFUSED[case]
    task = make(kind, architecture, row, tokenizer)
    steps = (task.build_data, lambda: task.inputs(read_part(task.config, None).train))
    for step, message in zip(steps, said, strict=True):
        if message is None:
            step()
            continue
        with pytest.raises(DataError) as caught:
            step()
        assert caught.value.message.startswith(message)
        assert caught.value.where == f"{tmp_path / 'test.jsonl'}:1"
        assert "--skip-bad-lines" not in str(caught.value.hint) or step == task.build_data
