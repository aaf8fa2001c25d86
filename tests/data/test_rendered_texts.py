"""Texts that were rendered before have their special tokens once, in every task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from rapidformer_templates.data.text.special_tokens import added_tokens, once
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.texts import Load

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("causal_lm", {"text": "<s>the cat sees"}),
    "completion": ("causal_lm", {"prompt": "<s>the cat", "completion": " sees"}),
    "pair": ("preference", {"prompt": "<s>the cat", "chosen": " sees", "rejected": " eats"}),
    "whole pair": ("preference", {"chosen": "<s>the cat sees", "rejected": "<s>the cat eats"}),
    "reward": ("reward", {"prompt": "<s>the cat", "chosen": " sees", "rejected": " eats"}),
    "class": ("sequence_classification", {"text": "<s>the cat", "label": "x"}),
    "two texts": ("sequence_classification", {"premise": "<s>the cat", "hypothesis": "sees", "label": "x"}),
    "source and target": ("seq2seq_lm", {"source": "<s>the cat", "target": "<s>sees"}),
    "choices": ("multiple_choice", {"context": "<s>the cat", "choices": ["sees", "eats"], "label": 0}),
    "masks": ("masked_lm", {"text": "<s>the cat"}),
}
NOTE = "texts begin or end with special tokens that the tokenizer adds, so it does not add them again"


@pytest.fixture(scope="module")
def tokenizer_folder(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that begins each text with ``<s>``, as llama's does, and ends it with ``</s>``."""
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    special = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>", "sep": "</s>"}
    tokenizer.add_special_tokens({f"{name}_token": text for name, text in special.items()})
    marks = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=marks
    )
    folder = tmp_path_factory.mktemp("bos")
    tokenizer.save_pretrained(folder)
    return folder


def without_marks(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.replace("<s>", "") if isinstance(value, str) else value for name, value in row.items()}


@pytest.mark.parametrize("kind", ROWS)
def test_a_begin_token_in_the_text_is_not_added_again(kind: str, load: Load, tokenizer_folder: Path) -> None:
    name, row = ROWS[kind]
    samples, notes = [], []
    for content in (row, without_marks(row), {**row, "text": "<s>the cat</s>"} if kind == "text" else row):
        rows = [content, content | ({"label": "y"} if row.get("label") == "x" else {})]
        task = load(name, rows, tokenizer_path=str(tokenizer_folder), seq_length=32)
        samples.append(list(task.build_data().train or ()))  # type: ignore[call-overload]
        notes.append(task.notes)
    for rendered, bare in zip(*samples[:2], strict=True):
        assert str(rendered) == str(bare)
    assert (notes[0].count(NOTE), notes[1].count(NOTE)) == (1, 0)
    if kind == "text":
        assert task.tokenizer.decode(samples[2][0]["input_ids"]) == "<s>the cat</s>"


def test_which_tokens_are_added_and_which_remain(tokenizer_folder: Path, bert_folder: Path, gpt_folder: Path) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tokenizer_folder, bert_folder, gpt_folder)]
    names = [tuple(map(tokenizer.convert_ids_to_tokens, added_tokens(tokenizer))) for tokenizer in tokenizers]
    assert names == [(["<s>"], ["</s>"]), (["[CLS]"], ["[SEP]"]), ([], [])]
    added = [1], [2]
    for text, kept in (
        ([1, 2], [1, 2]),
        ([1, 1, 5, 2], [1, 5, 2]),
        ([1, 5, 2, 2], [1, 5, 2]),
        ([1, 5, 5, 2], [1, 5, 5, 2]),
    ):
        assert text[once(text, added)] == kept
    assert [7, 7][once([7, 7], ([7], [7]))] == [7, 7]  # an empty text between two added tokens


@pytest.mark.parametrize("prompt", ["<s>the cat", "the cat"])
def test_a_prompt_to_continue(prompt: str, load: Load, tokenizer_folder: Path) -> None:
    task = load("causal_lm", tokenizer_path=str(tokenizer_folder), seq_length=32)
    ids = task.inputs(samples_as_part([prompt])).rows[0]["input_ids"]
    assert task.tokenizer.decode(ids) == "<s>the cat"
