"""A task reads other rows by the columns that it has found in its training part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rapidformer_templates.data.finetuning.column_names import check_input_columns, check_training_columns, columns_of
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import DataError, RapidformerError
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.messages import Says
from tests.support.preference_runs import words
from tests.support.texts import Load, write_jsonl

Rows = list[dict[str, Any]]


TEXTS = [words(3 + i % 7, i) for i in range(12)]


VALUES: dict[str, Callable[[int], Any]] = {
    "text": lambda i: TEXTS[i],
    "other": lambda i: f"{TEXTS[-i]}!",
    "class": lambda i: "ab"[i % 2],
    "words": lambda i: TEXTS[i].split(),
    "tags": lambda i: ["O", "B-x", "O"] + ["O"] * (i % 7),
    "hidden": lambda i: f"[MASK] {TEXTS[i]}",
    "talk": lambda i: [{"role": "user", "content": TEXTS[i]}, {"role": "assistant", "content": TEXTS[i - 1]}],
    "worse": lambda i: [{"role": "user", "content": TEXTS[i]}, {"role": "assistant", "content": "x"}],
    "answers": lambda i: {"text": [TEXTS[i].split()[1]], "answer_start": [TEXTS[i].index(" ") + 1]},
    "x": lambda i: "x",
    "xs": lambda i: ["x"],
    "mask": lambda i: "[MASK]",
    "asked": lambda i: [{"role": "user", "content": "x"}],
}
"""How a row gets its values."""
CASES: Mapping[str, tuple[str, str, str]] = {
    # name: (task, columns with their values, additional columns that would be found first, or in addition)
    "a text": ("sequence_classification", "sentence=text sentiment=class", "text=x text_pair=x label=x"),
    "a pair": (
        "sequence_classification", "premise=text hypothesis=other label=class", "text=x sentence1=x sentence2=x",
    ),
    "a text alone": ("sequence_classification", "text=text label=class", "text_pair=x"),
    "words": ("token_classification", "words=words labels=tags", "tokens=xs ner_tags=xs"),
    "hidden words": ("masked_lm", "content=hidden", "text=mask"),
    "texts": ("causal_lm", "tweet=text", "messages=talk prompt=x completion=x text=x"),
    "instructions as texts": ("causal_lm", "text=text", "instruction=x output=x"),
    "prompts": ("causal_lm", "prompt=text completion=other", "messages=talk conversations=talk"),
    "older conversations": ("causal_lm", "conversations=talk", "messages=worse"),
    "instructions": ("causal_lm", "instruction=text response=other", "output=x input=x context=x system=x"),
    "texts from texts": ("seq2seq_lm", "article=text highlights=other", "source=x target=x"),
    "texts from instructions": (
        "seq2seq_lm", "instruction=text context=class answer=other", "input=x system=x target=x",
    ),
    "answers in contexts": ("question_answering", "question=mask context=text answers=answers", "text=x"),
    "preferred conversations": ("preference", "chosen=talk rejected=worse", "prompt=asked"),
    "preferred answers": ("reward", "prompt=text chosen=other rejected=class", "text=x completion=x label=class"),
}  # fmt: skip


def rows_of(columns: str) -> Rows:
    makers = [column.split("=") for column in columns.split()]
    return [{name: VALUES[kind](i) for name, kind in makers} for i in range(len(TEXTS))]


@pytest.fixture
def make(load: Load) -> Callable[..., Task]:
    return lambda case, folder, **flags: load(CASES[case][0], data_dir=str(folder), seq_length=96, **flags)


@pytest.mark.parametrize("case", CASES)
def test_further_columns_change_nothing(case: str, make: Callable[..., Task], tmp_path: Path) -> None:
    rows, further = map(rows_of, CASES[case][1:])
    for folder, of in {"learnt": rows, "other": [{**b, **a} for a, b in zip(rows, further, strict=True)]}.items():
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "valid.jsonl", of)
    write_jsonl(tmp_path / "learnt/train.jsonl", rows)
    trained = make(case, tmp_path / "learnt")
    wanted = trained.build_data()
    task = make(case, tmp_path / "other")
    task.load_label_state(json.loads(json.dumps(trained.decisions())))
    for told, expected in zip(task.build_data().valid or (), wanted.valid or (), strict=True):  # type: ignore[call-overload]
        np.testing.assert_equal(told, expected)
    if case == "preferred conversations":
        return  # both are answered already: --text-column selects which to answer
    both = [{**row, **more, **row} for row, more in zip(rows, further, strict=True)]
    pairs = ((trained, rows), (task, both), (trained, both))
    assert len({repr(list(one.inputs(samples_as_part(of)).rows)) for one, of in pairs}) == 1


def test_a_column_that_other_rows_lack(make: Callable[..., Task], tmp_path: Path, says: Says) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows_of(CASES["a pair"][1]))
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "a", "label": 1}])
    with says(DataError):
        make("a pair", tmp_path).build_data()
    task = make("a pair", tmp_path, text_column="text")
    task.load_label_state({"columns": {"text_column": "premise", "pair_column": "hypothesis", "label_column": "label"}})
    with says(DataError):
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("text,label\nx,0\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\t0\n")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\nbroken\n{"label": 0}\n')
    (tmp_path / "d.json").write_text('[{"text": "x", "label": 0}]')
    pq.write_table(pa.table({"text": ["x"], "label": [0]}), tmp_path / "e.parquet")
    return tmp_path


def test_all_formats_name_their_columns(folder: Path) -> None:
    files = sorted(folder.iterdir())
    assert {path.name: columns_of(path) for path in files} == {path.name: ["text", "label"] for path in files}
    (folder / "f.txt").write_text("words")
    (folder / "g.csv").write_text("")
    assert columns_of(folder / "f.txt") is columns_of(folder / "g.csv") is None


def test_training_names_every_missing_column(folder: Path, says: Says) -> None:
    flags = {"data_dir": str(folder), "data_name": "a.csv"}
    for more in ({"text_column": "txt"}, {"text_column": "txt", "label_column": "gold"}):
        with says(RapidformerError):
            check_training_columns(DataFlags(**flags, **more))
    check_training_columns(DataFlags(**flags, text_column="label"))


def test_an_input_lacks_a_column(folder: Path, says: Says) -> None:
    cases: list[tuple[str, dict[str, str], dict[str, str | None]]] = [
        ("sequence_classification", {}, {"text_column": "review", "pair_column": None}),
        ("sequence_classification", {}, {"text_column": "text", "pair_column": "pair"}),
        ("sequence_classification", {"pair_column": "b"}, {}),
        ("question_answering", {}, {}),
        ("causal_lm", {"text_column": "prompt"}, {}),
        ("seq2seq_lm", {}, {"text_column": "source"}),
    ]
    for task, flags, trained in cases:
        with says(RapidformerError):
            check_input_columns(task, DataFlags(**flags), trained, folder / "a.csv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "trained"),
    [
        ("sequence_classification", {"text_column": "text", "pair_column": None}),
        ("sequence_classification", {}),
        ("causal_lm", {"kind": "chat", "text_column": "messages"}),  # continues any usual column
        ("reward", {}),
        (None, {}),
    ],
)
def test_an_input_has_its_columns(folder: Path, task: str | None, trained: dict[str, str | None]) -> None:
    check_input_columns(task, DataFlags(), trained, folder / "a.csv")
