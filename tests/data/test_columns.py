"""A task reads other rows by the columns that it has found in its training part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.texts import TINY, WORDS, write_jsonl

Configure = Callable[..., RunConfig]
Rows = list[dict[str, Any]]


def words(count: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


TEXTS = [words(3 + i % 7, i) for i in range(12)]


def rows_of(**columns: Callable[[int], Any]) -> Rows:
    return [{name: make(i) for name, make in columns.items()} for i in range(len(TEXTS))]


def said(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": TEXTS[i]}, {"role": "assistant", "content": TEXTS[i - 1]}]


def answered(i: int) -> dict[str, list[Any]]:
    return {"text": [TEXTS[i].split()[1]], "answer_start": [TEXTS[i].index(" ") + 1]}


CASES: Mapping[str, tuple[str, str, Rows, Rows]] = {
    # name: (task, architecture, rows, additional columns that would be found first, or in addition)
    "a text": (
        "sequence_classification", "bert",
        rows_of(sentence=lambda i: TEXTS[i], sentiment=lambda i: "ab"[i % 2]),
        rows_of(text=lambda i: "x", text_pair=lambda i: "y", label=lambda i: "c"),
    ),
    "a pair": (
        "sequence_classification", "bert",
        rows_of(premise=lambda i: TEXTS[i], hypothesis=lambda i: TEXTS[-i], label=lambda i: i % 3),
        rows_of(text=lambda i: "x", sentence1=lambda i: "y", sentence2=lambda i: "z"),
    ),
    "a text alone": (
        "sequence_classification", "bert",
        rows_of(text=lambda i: TEXTS[i], label=lambda i: i % 3),
        rows_of(text_pair=lambda i: "x"),
    ),
    "words": (
        "token_classification", "bert",
        rows_of(words=lambda i: TEXTS[i].split(), labels=lambda i: ["O", "B-x", "O"] + ["O"] * (i % 7)),
        rows_of(tokens=lambda i: ["x"], ner_tags=lambda i: ["O"]),
    ),
    "hidden words": (
        "masked_lm", "bert", rows_of(content=lambda i: f"[MASK] {TEXTS[i]}"), rows_of(text=lambda i: "[MASK]"),
    ),
    "texts": (
        "causal_lm", "gpt2", rows_of(tweet=lambda i: TEXTS[i]),
        rows_of(messages=said, prompt=lambda i: "x", completion=lambda i: "y", text=lambda i: "z"),
    ),
    "instructions as texts": (
        "causal_lm", "gpt2", rows_of(text=lambda i: TEXTS[i]),
        rows_of(instruction=lambda i: "x", output=lambda i: "y"),
    ),
    "prompts": (
        "causal_lm", "gpt2", rows_of(prompt=lambda i: TEXTS[i], completion=lambda i: TEXTS[-i]),
        rows_of(messages=said, conversations=said),
    ),
    "older conversations": ("causal_lm", "gpt2", rows_of(conversations=said), rows_of(messages=lambda i: said(i - 1))),
    "instructions": (
        "causal_lm", "gpt2", rows_of(instruction=lambda i: TEXTS[i], response=lambda i: TEXTS[-i]),
        rows_of(output=lambda i: "x", input=lambda i: "y", context=lambda i: "z", system=lambda i: "w"),
    ),
    "texts from texts": (
        "seq2seq_lm", "t5", rows_of(article=lambda i: TEXTS[i], highlights=lambda i: TEXTS[-i]),
        rows_of(source=lambda i: "x", target=lambda i: "y"),
    ),
    "texts from instructions": (
        "seq2seq_lm", "t5",
        rows_of(instruction=lambda i: TEXTS[i], context=lambda i: WORDS[i], answer=lambda i: TEXTS[-i]),
        rows_of(input=lambda i: "x", system=lambda i: "y", target=lambda i: "z"),
    ),
    "answers in contexts": (
        "question_answering", "bert",
        rows_of(question=lambda i: "the cat", context=lambda i: TEXTS[i], answers=answered),
        rows_of(text=lambda i: "x"),
    ),
    "preferred conversations": (
        "preference", "gpt2", rows_of(chosen=said, rejected=lambda i: [*said(i)[:1], {**said(i)[1], "content": "x"}]),
        rows_of(prompt=lambda i: [{"role": "user", "content": "x"}]),
    ),
    "preferred answers": (
        "reward", "gpt2",
        rows_of(prompt=lambda i: TEXTS[i], chosen=lambda i: TEXTS[-i] + "!", rejected=lambda i: TEXTS[i - 1]),
        rows_of(text=lambda i: "x", completion=lambda i: "y", label=lambda i: True),
    ),
}  # fmt: skip


@pytest.fixture
def make(configure: Configure, bert_folder: Path, gpt_folder: Path) -> Callable[..., Task]:
    def task(case: str, folder: Path, **flags: Any) -> Task:
        kind, architecture, *_ = CASES[case]
        tokenizer = str(gpt_folder if architecture == "gpt2" else bert_folder)
        common = {"model_type": architecture, "tokenizer_path": tokenizer, "seq_length": 96, "data_dir": str(folder)}
        return load_task(configure(task=kind, **TINY, **(common | flags)))

    return task


def same(told: Any, wanted: Any) -> None:
    """Assert that samples, or inputs, have the same values."""
    for one, other in zip(told, wanted, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_further_columns_change_nothing(case: str, make: Callable[..., Task], tmp_path: Path) -> None:
    rows, further = CASES[case][2:]
    for folder, of in {"learnt": rows, "other": [{**b, **a} for a, b in zip(rows, further, strict=True)]}.items():
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "valid.jsonl", of)
    write_jsonl(tmp_path / "learnt/train.jsonl", rows)
    trained = make(case, tmp_path / "learnt")
    wanted = trained.build_data()
    task = make(case, tmp_path / "other")
    task.load_label_state(json.loads(json.dumps(trained.decisions())))
    same(task.build_data().valid, wanted.valid)
    if case == "preferred conversations":
        return  # both are answered already: --text-column selects which to answer
    both = [{**row, **more, **row} for row, more in zip(rows, further, strict=True)]
    told, asked = (repr(list(one.inputs(samples_as_part(of)).rows)) for one, of in ((trained, rows), (task, both)))
    assert asked == told == repr(list(trained.inputs(samples_as_part(both)).rows))


def test_a_column_that_other_rows_lack(make: Callable[..., Task], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", CASES["a pair"][2])
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "a", "label": 1}])
    with pytest.raises(DataError) as caught:
        make("a pair", tmp_path).build_data()
    assert caught.value.message == "there is no column 'premise', which was used to read the training part"
    assert caught.value.where == str(tmp_path / "valid.jsonl")
    assert caught.value.hint == "columns: text, label; --text-column names another one"
    task = make("a pair", tmp_path, text_column="text")
    task.load_label_state({"columns": {"text_column": "premise", "pair_column": "hypothesis", "label_column": "label"}})
    with pytest.raises(DataError, match="there is no column 'hypothesis'"):
        task.inputs(samples_as_part(["a"], task.text_column))
    chat = make("texts", tmp_path)
    chat.load_label_state({"columns": {"kind": "chat", "text_column": "messages"}})
    assert len(chat.inputs(samples_as_part(["a cat"], chat.text_column)).rows) == 1  # it can continue any text


def test_what_nobody_has_decided_is_found_each_time(make: Callable[..., Task], tmp_path: Path) -> None:
    """This concerns a model from elsewhere, and sets of a mixture with different columns."""
    task = make("a text", tmp_path)
    task.load_label_state({})
    for column in ("text", "review"):
        assert len(task.inputs(samples_as_part([{column: "a"}])).rows) == 1
    for name, column in (("one", "text"), ("same", "text"), ("other", "review")):
        write_jsonl(tmp_path / f"{name}.jsonl", [{column: text, "label": "ab"[i % 2]} for i, text in enumerate(TEXTS)])
    for sets, columns in (
        ("0.5 one 0.5 other", None),
        ("0.5 one 0.5 same", {"text_column": "text", "pair_column": None, "label_column": "label"}),
    ):
        mixture = make("a text", tmp_path, data_name=sets)
        mixture.build_data()
        assert mixture.decisions().get("columns") == columns
