"""Rows without a token, without a value, or with a wrong type: what works, and what is an error with file and line."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.finetuning.tables import read_part
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import Load, write_jsonl

LONG = "the cat " * 200


BERT, GPT = ("bert", "bert"), ("gpt2", "gpt")
BERT, GPT, BARE, T5 = ("bert", "bert"), ("gpt2", "gpt"), ("gpt2", "bare"), ("t5", "gpt")
CASES: Mapping[str, tuple[str, tuple[str, str], dict[str, Any], str]] = {
    # name: (task, (architecture, tokenizer), row, which of evaluation and prediction works)
    "no token": ("sequence_classification", GPT, {"text": "", "label": "O"}, ""),
    "an empty text": ("sequence_classification", BERT, {"text": " ", "label": "O"}, "predicts"),
    "an empty list of words": ("token_classification", BERT, {"tokens": [], "tags": []}, "predicts"),
    "a long text": ("sequence_classification", BERT, {"text": LONG, "label": "O"}, "evaluates, predicts"),
    "no label": ("sequence_classification", BERT, {"text": "a", "label": None}, "predicts"),
    "an unknown label": ("sequence_classification", BERT, {"text": "a", "label": "x"}, "predicts"),
    "no text": ("sequence_classification", BERT, {"text": None, "label": "O"}, ""),
    "no word": ("token_classification", BERT, {"tokens": ["a", None], "tags": ["O", "O"]}, ""),
    "a number for words": ("token_classification", BERT, {"tokens": 5, "tags": ["O"]}, ""),
    "a number for tags": ("token_classification", BERT, {"tokens": ["a"], "tags": 3}, "predicts"),
    "no words": ("token_classification", GPT, {"tokens": ["a"], "tags": ["O"]}, "evaluates, predicts"),
    "a word of no token": (
        "token_classification", BERT, {"tokens": ["\u200b", "a"], "tags": ["O", "O"]}, "evaluates, predicts",
    ),
    "an empty line": ("causal_lm", GPT, {"text": ""}, ""),
    "a prompt of no token": ("causal_lm", BARE, {"text": "日本"}, ""),
    "a long prompt": ("causal_lm", GPT, {"text": LONG * 9}, "evaluates"),
    "no message": ("causal_lm", GPT, {"messages": []}, ""),
    "no source": ("seq2seq_lm", T5, {"source": "", "target": "a"}, ""),
    "no target": ("seq2seq_lm", T5, {"source": "a", "target": ""}, "predicts"),
    "a hidden word of none": ("masked_lm", BERT, {"text": ""}, "evaluates"),
    "an empty context": (
        "question_answering", BERT, {"question": "", "context": "", "answers": {"text": [], "answer_start": []}},
        "evaluates, predicts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_odd_rows(case: str, load: Load, bert_folder: Path, gpt_folder: Path, tmp_path: Path, says: Says) -> None:
    kind, (architecture, tokenizer), row, works = CASES[case]
    write_jsonl(tmp_path / "test.jsonl", [row])
    folder = {"gpt": gpt_folder, "bert": bert_folder, "bare": tmp_path / "bare"}[tokenizer]
    if tokenizer == "bare":  # it has no token for unknown characters
        known = Tokenizer(BPE({"<pad>": 0, "a": 1}, []))
        PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>").save_pretrained(folder)
    flags = {"model_type": architecture, "tokenizer_path": str(folder), "seq_length": 24, "max_eval_samples": 1}
    task = load(kind, **flags)
    task.load_label_state({"labels": ["O", "B-x"], "problem": "single_label_classification"})
    for step, name in ((task.build_data, "evaluates"), (partial(inputs, task), "predicts")):
        with contextlib.nullcontext() if name in works else says(DataError):
            step()


def inputs(task: Task) -> Any:
    return task.inputs(read_part(task.config, None).train)
