"""Texts that were rendered before have their special tokens once, in every task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.text.special_tokens import added_tokens, once
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, write_jsonl

Configure = Callable[..., RunConfig]
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text": ("causal_lm", "gpt2", {"text": "<s>the cat sees"}),
    "completion": ("causal_lm", "gpt2", {"prompt": "<s>the cat", "completion": " sees"}),
    "pair": ("preference", "gpt2", {"prompt": "<s>the cat", "chosen": " sees", "rejected": " eats"}),
    "whole pair": ("preference", "gpt2", {"chosen": "<s>the cat sees", "rejected": "<s>the cat eats"}),
    "reward": ("reward", "gpt2", {"prompt": "<s>the cat", "chosen": " sees", "rejected": " eats"}),
    "class": ("sequence_classification", "gpt2", {"text": "<s>the cat", "label": "x"}),
    "two texts": ("sequence_classification", "gpt2", {"premise": "<s>the cat", "hypothesis": "sees", "label": "x"}),
    "source and target": ("seq2seq_lm", "t5", {"source": "<s>the cat", "target": "<s>sees"}),
    "choices": ("multiple_choice", "bert", {"context": "<s>the cat", "choices": ["sees", "eats"], "label": 0}),
    "masks": ("masked_lm", "bert", {"text": "<s>the cat"}),
}
NOTE = "texts begin or end with special tokens that the tokenizer adds, so it does not add them again"


@pytest.fixture(scope="module")
def tokenizer_folder(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that begins each text with ``<s>``, as llama's does, and ends it with ``</s>``."""
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "sep_token": "</s>",
    }
    tokenizer.add_special_tokens(special)
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
def test_a_begin_token_in_the_text_is_not_added_again(
    kind: str, configure: Configure, tokenizer_folder: Path, tmp_path: Path
) -> None:
    name, architecture, row = ROWS[kind]
    samples, notes = [], []
    for content in (row, without_marks(row), {**row, "text": "<s>the cat</s>"} if kind == "text" else row):
        write_jsonl(tmp_path / "train.jsonl", [content, content | ({"label": "y"} if row.get("label") == "x" else {})])
        flags = {"data_dir": str(tmp_path), "model_type": architecture, "tokenizer_path": str(tokenizer_folder)}
        task = load_task(configure(task=name, **(TINY | {"seq_length": 32, "validation_fraction": 0.0} | flags)))
        samples.append([task.build_data().train[i] for i in range(2)])  # type: ignore[index]
        notes.append(task.notes)
    for rendered, bare in zip(*samples[:2], strict=True):
        assert str(rendered) == str(bare)
    assert notes[0].count(NOTE) == 1
    assert NOTE not in notes[1]
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
def test_a_prompt_to_continue(prompt: str, configure: Configure, tokenizer_folder: Path, tmp_path: Path) -> None:
    from rapidformer_templates.run.predictions import samples_as_part

    flags = {"model_type": "gpt2", "tokenizer_path": str(tokenizer_folder), "data_dir": str(tmp_path)}
    task = load_task(configure(task="causal_lm", **(TINY | {"seq_length": 32} | flags)))
    ids = task.inputs(samples_as_part([prompt])).rows[0]["input_ids"]
    assert task.tokenizer.decode(ids) == "<s>the cat"
