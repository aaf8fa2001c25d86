"""Columns of data files, found before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rapidformer_templates.data.finetuning.column_names import (
    check_input_columns,
    check_training_columns,
    columns_of,
)
from rapidformer_templates.errors import DataError, RapidformerError, SeveralMistakes
from rapidformer_templates.planning.flags import DataFlags


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


def test_training_names_every_missing_column(folder: Path) -> None:
    flags = DataFlags(data_dir=str(folder), data_name="a.csv", text_column="txt", label_column="gold")
    with pytest.raises(DataError, match="txt") as caught:
        check_training_columns(DataFlags(data_dir=str(folder), data_name="a.csv", text_column="txt"))
    assert caught.value.hint == "did you mean text? columns: text, label"
    with pytest.raises(SeveralMistakes, match=r"(?s)'txt'.*'gold'"):
        check_training_columns(flags)
    check_training_columns(DataFlags(data_dir=str(folder), data_name="a.csv", text_column="label"))


@pytest.mark.parametrize(
    ("task", "flags", "trained", "message"),
    [
        (
            "sequence_classification",
            {},
            {"text_column": "review", "pair_column": None},
            "'review', which was",
        ),
        ("sequence_classification", {}, {"text_column": "text", "pair_column": "pair"}, "no column 'pair', which was"),
        ("sequence_classification", {"pair_column": "b"}, {}, "there is no column 'b'"),
        ("question_answering", {}, {}, "none of the columns is called question"),
        ("causal_lm", {"text_column": "prompt"}, {}, "there is no column 'prompt'"),
        ("seq2seq_lm", {}, {"text_column": "source"}, "no column 'source', which was"),
    ],
)
def test_an_input_lacks_a_column(
    folder: Path, task: str, flags: dict[str, str], trained: dict[str, str | None], message: str
) -> None:
    with pytest.raises(RapidformerError, match=message):
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
