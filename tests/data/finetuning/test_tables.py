"""Every format gives the same table, and every error names the file and line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rapidformer_templates.data.finetuning.locating import locate, training_samples
from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.messages import Says
from tests.support.texts import write_jsonl

Configure = Callable[..., RunConfig]
ROWS = [{"text": f'row {i}, "quoted"\nand é', "label": "good" if i % 3 else "bad"} for i in range(20)]


def write(folder: Path, stem: str, kind: str, rows: list[dict[str, Any]] = ROWS) -> None:
    path = folder / f"{stem}.{kind}"
    if kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind == "data.json":
        (folder / f"{stem}.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / stem))


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "data.json", "parquet", "saved"])
def test_every_format_gives_the_same_table(tmp_path: Path, configure: Configure, kind: str) -> None:
    write(tmp_path, "set", kind)
    raw = read_dataset(configure(data_dir=str(tmp_path), data_name="set", validation_fraction=0.0))
    assert raw.train.table.to_list() == ROWS
    assert raw.valid is None


@pytest.mark.parametrize("layout", ["{part}", "set/{part}", "set-{part}", "set_{part}", "set.{part}"])
def test_parts_are_found_by_their_names(tmp_path: Path, configure: Configure, layout: str) -> None:
    (tmp_path / layout.format(part="train")).parent.mkdir(exist_ok=True)
    for part, count in (("train", 8), ("dev", 4), ("test", 2)):
        write(tmp_path, layout.format(part=part), "csv", ROWS[:count])
    name = None if layout == "{part}" else "set"
    config = configure(data_dir=str(tmp_path), data_name=name)
    raw = read_dataset(config)
    assert [len(part) for part in raw.parts().values()] == [8, 4]
    assert not raw.held_out
    found = locate(config.data)
    assert [path.stem for path in found.parts["test"]] == [Path(layout.format(part="test")).name]  # found, but not read


def test_a_plan_counts_no_rows_that_may_be_left_out(tmp_path: Path, configure: Configure) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "a b", "label": "x"}, {"text": None, "label": "x"}])
    flags = {"data_dir": str(tmp_path), "task": "sequence_classification", "validation_fraction": 0.0}
    assert training_samples(configure(**flags)) == 2
    assert training_samples(configure(**flags, skip_bad_lines=True)) is None


def test_shards_and_saved_parts(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "train-00000-of-00002", "parquet", ROWS[:5])
    write(tmp_path, "train-00001-of-00002", "parquet", ROWS[5:])
    raw = read_dataset(configure(data_dir=str(tmp_path), validation_fraction=0.0))
    assert raw.train.table.to_list() == ROWS
    assert raw.train.where(5).endswith("train-00001-of-00002.parquet, row 1")
    parts = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:3])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    raw = read_dataset(configure(data_dir=str(tmp_path), data_name="saved"))
    assert {name: len(part) for name, part in raw.parts().items()} == {"train": 20, "valid": 3}


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": null}', '{"_data_files": [{"filename": null}]}'])
def test_a_damaged_saved_part(tmp_path: Path, configure: Configure, state: str, says: Says) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    config = configure(data_dir=str(tmp_path), data_name="saved", task="causal_lm")
    (tmp_path / "saved/train/state.json").write_text(state, encoding="utf-8")
    with says(DataError):
        read_dataset(config)
    assert training_samples(config) is None  # so that a plan can still be shown


def test_the_held_out_share_depends_on_the_seed_only(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "set", "csv")
    flags = {"data_dir": str(tmp_path), "data_name": "set", "validation_fraction": 0.25}
    first, again, other = (read_dataset(configure(**flags, seed=seed)) for seed in (1, 1, 2))
    assert first.valid is not None
    assert again.valid is not None
    assert other.valid is not None
    assert (len(first.train), len(first.valid)) == (15, 5)
    assert first.valid.table.to_list() == again.valid.table.to_list() != other.valid.table.to_list()
    both = first.train.table.to_list() + first.valid.table.to_list()
    assert sorted(row["text"] for row in both) == sorted(row["text"] for row in ROWS)
    few = read_dataset(configure(**flags, max_train_samples=4, max_eval_samples=2))
    assert few.valid is not None
    assert (len(few.train), len(few.valid)) == (4, 2)


def test_lines_of_records_that_span_lines(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "set", "csv")
    raw = read_dataset(configure(data_dir=str(tmp_path), validation_fraction=0.0))
    assert raw.train.where(0).endswith("set.csv:2")
    assert raw.train.where(3).endswith("set.csv:8")  # each record has two lines


BROKEN = {
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n{"text": "c"}\n', 2, "broken JSON: Expecting value"),
    "list.jsonl": (b'{"text": "a"}\n[1]\n{"text": "c"}\n', 2, "a line must hold a JSON object, not list"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "c"}\n', 2, "the text is not UTF-8"),
    "ragged.csv": (b"text,label\na,1\nb\nc,3\n", 3, "the line has 1 column, the header has 2"),
    "latin.csv": (b"text,label\na,1\nb,\xe9\nc,3\n", 3, "the text is not UTF-8"),
    "quotes.csv": (b'text,label\na,1\n"b"x,2\nc,3\n', 3, "broken quoting: ',' expected after '\"'"),
    "carriage.csv": (b"text,label\na,1\nb\rd,2\nc,3\n", 3, "a carriage return is not at the end of the line"),
    "ragged.tsv": (b"text\tlabel\na\t1\nb\t2\t3\nc\t3\n", 3, "the line has 3 columns, the header has 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, configure: Configure, name: str) -> None:
    content, line, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_dataset(configure(data_dir=str(tmp_path)))
    assert caught.value.message.startswith(message)
    assert caught.value.where == f"{tmp_path / name}:{line}"
    assert "--skip-bad-lines" in str(caught.value.hint)
    bad = BadLines(skip=True)
    raw = read_dataset(configure(data_dir=str(tmp_path), validation_fraction=0.0), bad)
    assert raw.train.table["text"][:] == ["a", "c"]
    assert len(bad.skipped) == 1
    assert bad.skipped[0].startswith(f"{tmp_path / name}:{line}: {message}")


GLUE = 'text\tlabel\n"w1 w2\ta\nw3 "w4"\tb\nw5 w6"\ta\n"w7"\tb\n'
DIALECTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "quotes in texts.tsv": (GLUE, [('"w1 w2', "a"), ('w3 "w4"', "b"), ('w5 w6"', "a"), ('"w7"', "b")]),
    "quotes in texts, dos.tsv": (
        GLUE.replace("\n", "\r\n"),
        [('"w1 w2', "a"), ('w3 "w4"', "b"), ('w5 w6"', "a"), ('"w7"', "b")],
    ),
    "quotes in texts, tabs.csv": (GLUE, [('"w1 w2', "a"), ('w3 "w4"', "b"), ('w5 w6"', "a"), ('"w7"', "b")]),
    "a spreadsheet.tsv": ('text\tlabel\n"say ""a""\nb"\tx\nc\ty\n', [('say "a"\nb', "x"), ("c", "y")]),
    "enclosed.tsv": ('text\tlabel\n"a\tb"\tx\n"c ""d"""\ty\n', [("a\tb", "x"), ('c "d"', "y")]),
    "a comma in the header.csv": ("text;label, old\na;x\nb;y\n", [("a", "x"), ("b", "y")]),
    "decimal commas.csv": ("text;score\na;1,5\nb;2,5\n", [("a", "1,5"), ("b", "2,5")]),
    "a semicolon in the header.csv": ("text; raw,label\na,x\nb,y\n", [("a", "x"), ("b", "y")]),
    "semicolons in texts.csv": ('text,label\na; b,x\n"c; d, e",y\n', [("a; b", "x"), ("c; d, e", "y")]),
    "tabs in texts.csv": ('text,label\na\tb,x\n"c\td",y\n', [("a\tb", "x"), ("c\td", "y")]),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_the_dialect_of_a_file_is_that_of_its_lines(tmp_path: Path, configure: Configure, name: str) -> None:
    content, rows = DIALECTS[name]
    (tmp_path / name).write_bytes(content.encode())
    table = read_dataset(configure(data_dir=str(tmp_path), validation_fraction=0.0)).train.table
    assert [tuple(row.values()) for row in table.to_list()] == rows


def test_a_quote_that_joins_rows_is_named(tmp_path: Path, configure: Configure) -> None:
    for name, content in {"ragged": 'text\tlabel\n"a\tx\nb\ty\nc"\tx\nd\n', "one": 'text\n"a\nb\nc"\nd\n'}.items():
        (tmp_path / f"{name}.tsv").write_text(content, encoding="utf-8")
        message = message_of(configure(data_dir=str(tmp_path), data_name=name))
        assert "a quote joins 3 lines, which may be rows" in message
        assert f"{tmp_path}/{name}.tsv:2" in message


def test_an_open_quote_does_not_swallow_the_file_in_silence(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "a.csv").write_text('text,label\na,1\n"b,2\nc,3\n', encoding="utf-8")
    with pytest.raises(DataError, match="a quoted field is never closed") as caught:
        read_dataset(configure(data_dir=str(tmp_path)))
    assert caught.value.where == f"{tmp_path / 'a.csv'}:3"


def test_broken_json_document(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"},\n {"text" "b"}]', encoding="utf-8")
    with pytest.raises(DataError, match="broken JSON: Expecting ':' delimiter") as caught:
        read_dataset(configure(data_dir=str(tmp_path)))
    assert caught.value.where == f"{tmp_path / 'a.json'}:2"
    (tmp_path / "a.json").write_text('{"text": "a"}', encoding="utf-8")
    with pytest.raises(DataError, match="does not hold a list of objects"):
        read_dataset(configure(data_dir=str(tmp_path)))


@pytest.mark.parametrize("content", ["", "text,label\n"])
def test_an_empty_data_set(tmp_path: Path, configure: Configure, content: str) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="the data set is empty"):
        read_dataset(configure(data_dir=str(tmp_path)))


def message_of(config: RunConfig) -> str:
    with pytest.raises(DataError) as caught:
        read_dataset(config)
    return caught.value.render()


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "tweets", "csv")
    write(tmp_path, "reviews", "csv")
    text = message_of(configure(data_dir=str(tmp_path), data_name="tweet"))
    assert f"error: there is no data set 'tweet' in {tmp_path}" in text
    assert "did you mean tweets.csv? the folder holds: reviews.csv, tweets.csv" in text
    text = message_of(configure(data_dir=str(tmp_path)))
    assert "keep one, or choose one with --data-name: reviews.csv, tweets.csv" in text
    text = message_of(configure(data_dir=str(tmp_path) + "x"))
    assert re.search(rf"does not exist\n  where  --data-dir\n  help   did you mean {tmp_path}\?", text)
    assert "--data-dir" in message_of(configure())
    write(tmp_path, "tweets", "jsonl")
    assert "several files" in message_of(configure(data_dir=str(tmp_path), data_name="tweets"))
    assert read_dataset(configure(data_dir=str(tmp_path), data_name="tweets.jsonl")).train
    write(tmp_path, "both-train", "csv")
    write(tmp_path, "both-train", "jsonl")
    text = message_of(configure(data_dir=str(tmp_path), data_name="both"))
    assert "several files" in text
    assert "both-train.csv, both-train.jsonl" in text


def test_a_column_that_is_not_there(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "set", "csv")
    train = read_dataset(configure(data_dir=str(tmp_path))).train
    assert train.column("text_column", None, ("sentence", "text")) == "text"
    with pytest.raises(DataError) as caught:
        train.column("text_column", "txet", ())
    assert caught.value.message == f"there is no column 'txet' in {tmp_path / 'set.csv'}"
    assert caught.value.where == "--text-column txet"
    assert caught.value.hint == "did you mean text? columns: text, label"
    with pytest.raises(DataError) as caught:
        train.column("label_column", None, ("target",))
    assert caught.value.hint == "choose one with --label-column: text, label"


def test_a_column_of_mixed_kinds(tmp_path: Path, configure: Configure) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None}, {"text": 3}])
    with pytest.raises(DataError, match="the column 'text' holds '3', which has another type") as caught:
        read_dataset(configure(data_dir=str(tmp_path)))
    assert caught.value.where == f"{tmp_path / 'a.jsonl'}:3"
    for value in (10**30, "half a character: \ud83d", [10**30]):
        write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "more": None}, {"text": "b", "more": value}])
        with pytest.raises(DataError, match=r"the column 'more' holds .*, which cannot be read") as caught:
            read_dataset(configure(data_dir=str(tmp_path)))
        assert caught.value.where == f"{tmp_path / 'a.jsonl'}:2"


def test_nothing_left_to_train_on(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "set", "csv")
    assert "--validation-fraction" in message_of(configure(data_dir=str(tmp_path), validation_fraction=1.0))
    write(tmp_path, "other-test", "csv")
    assert "no training part" in message_of(configure(data_dir=str(tmp_path), data_name="other"))


def test_a_header_that_names_a_column_twice(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n", encoding="utf-8")
    assert "names the column 'text' twice" in message_of(configure(data_dir=str(tmp_path)))
