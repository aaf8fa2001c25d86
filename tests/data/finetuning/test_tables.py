"""Every format gives the same table, and every error names the file and line."""

import csv
import gzip
import io
import json
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
from tests.support.messages import Says
from tests.support.texts import Configure, write_jsonl

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
    raws: list[Any] = [read_dataset(configure(**flags, seed=seed)) for seed in (1, 1, 2)]
    assert (len(raws[0].train), len(raws[0].valid)) == (15, 5)
    first, again, other = (raw.valid.table.to_list() for raw in raws)
    assert first == again != other
    both = raws[0].train.table.to_list() + first
    assert sorted(row["text"] for row in both) == sorted(row["text"] for row in ROWS)
    few: Any = read_dataset(configure(**flags, max_train_samples=4, max_eval_samples=2))
    assert (len(few.train), len(few.valid)) == (4, 2)


def test_lines_of_records_that_span_lines(tmp_path: Path, configure: Configure) -> None:
    write(tmp_path, "set", "csv")
    raw = read_dataset(configure(data_dir=str(tmp_path), validation_fraction=0.0))
    assert raw.train.where(0).endswith("set.csv:2")
    assert raw.train.where(3).endswith("set.csv:8")  # each record has two lines


BROKEN = {
    "bad.jsonl": b'{"text": "a"}\n{"text": \n{"text": "c"}\n',
    "list.jsonl": b'{"text": "a"}\n[1]\n{"text": "c"}\n',
    "latin.jsonl": b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "c"}\n',
    "ragged.csv": b"text,label\na,1\nb\nc,3\n",
    "latin.csv": b"text,label\na,1\nb,\xe9\nc,3\n",
    "too few and too many.csv": b"text,label\na,1\nb\nb,3,4\nc,3\n",
    "quotes.csv": b'text,label\na,1\n"b"x,2\nc,3\n',
    "carriage.csv": b"text,label\na,1\nb\rd,2\nc,3\n",
    "ragged.tsv": b"text\tlabel\na\t1\nb\t2\t3\nc\t3\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, configure: Configure, name: str, says: Says) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    config = configure(data_dir=str(tmp_path), validation_fraction=0.0)
    with says(DataError):
        read_dataset(config)
    bad = BadLines(skip=True)
    assert read_dataset(config, bad).train.table["text"][:] == ["a", "c"]
    says.text("\n".join(bad.skipped))


def parquet(columns: dict[str, list[str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


UNREADABLE: dict[str, bytes] = {
    "utf-16 without a mark.csv": "text\na".encode("utf-16-le"),
    "not compressed.csv.gz": b"text\na",
    "half.csv.gz": gzip.compress(b"text\na" * 99, mtime=0)[:20],
    "half utf-16.csv": "text\nab".encode("utf-16")[:-1],
    "latin header.csv": "größe,text\n1,b".encode("latin1"),
    "quotes in the header.csv": b'"te"xt,label\na,b\n',
    "a zero byte in the header.csv": b"text,la\0bel\na,b\n",
    "a column twice.csv": b"text,text\na,b\n",
    "an open quote.csv": b'text,label\na,1\n"b,2\nc,3\n',
    "a quote that joins ragged rows.tsv": b'text\tlabel\n"a\tx\nb\ty\nc"\tx\nd\n',
    "a quote that joins rows.tsv": b'text\n"a\nb\nc"\nd\n',
    "empty.csv": b"",
    "a header.csv": b"text,label\n",
    "latin.json": b'[{"text": "\xe9"}]',
    "broken.json": b'[{"text": "a"},\n {"text" "b"}]',
    "one object.json": b'{"text": "a"}',
    "a list.json": b'[{"text": "a"}, ["b"]]',
    "a long number.json": b'[{"text": ' + b"9" * 5000 + b"}]",
    "deep.json": b'[{"text": ' + b"[" * 100_000,
    "half a character in a name.json": b'[{"text": "a", "half \\ud83d": 1}]',
    "a zero in a name.jsonl": b'{"text": "a", "zero \\u0000": 1}',
    "no table.json": b'[{"text": {"\\u0000": [], "": {}}}]',
    "another type.jsonl": b'{"text": "a"}\n{"text": null}\n{"text": 3}\n',
    "a huge number.jsonl": b'{"text": "a", "more": null}\n{"text": "b", "more": 1' + b"0" * 30 + b"}\n",
    "half a character.jsonl": b'{"text": "a", "more": null}\n{"text": "b", "more": "\\ud83d"}\n',
    "a list of a huge number.jsonl": b'{"text": "a", "more": null}\n{"text": "b", "more": [1' + b"0" * 30 + b"]}\n",
    "no parquet.parquet": b"PAR1 is not enough PAR1",
    "latin name.parquet": parquet({"text": ["a"]}).replace(b"text", b"te\xabt"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read(tmp_path: Path, configure: Configure, name: str, says: Says) -> None:
    (tmp_path / name).write_bytes(UNREADABLE[name])
    with says(DataError):
        read_dataset(configure(data_dir=str(tmp_path)))


GLUE = 'text\tlabel\n"w1 w2\ta\nw3 "w4"\tb\nw5 w6"\ta\n"w7"\tb\n'
GLUE_ROWS = [('"w1 w2', "a"), ('w3 "w4"', "b"), ('w5 w6"', "a"), ('"w7"', "b")]
DIALECTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "quotes in texts.tsv": (GLUE, GLUE_ROWS),
    "quotes in texts, dos.tsv": (GLUE.replace("\n", "\r\n"), GLUE_ROWS),
    "quotes in texts, tabs.csv": (GLUE, GLUE_ROWS),
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


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path, configure: Configure, says: Says) -> None:
    for stem in ("tweets", "reviews", "other-test"):
        write(tmp_path, stem, "csv")
    for kind in ("csv", "jsonl"):
        write(tmp_path, "both", kind)
        write(tmp_path, "pair-train", kind)
    for more in (
        {"data_name": "tweet"}, {}, {"data_dir": f"{tmp_path}x"}, {"data_dir": None}, {"data_name": "both"},
        {"data_name": "pair"}, {"data_name": "other"}, {"data_name": "tweets", "validation_fraction": 1.0},
    ):  # fmt: skip
        with says(DataError):
            read_dataset(configure(**{"data_dir": str(tmp_path)} | more))
    assert read_dataset(configure(data_dir=str(tmp_path), data_name="both.jsonl")).train


def test_a_column_that_is_not_there(tmp_path: Path, configure: Configure, says: Says) -> None:
    write(tmp_path, "set", "csv")
    train = read_dataset(configure(data_dir=str(tmp_path))).train
    assert train.column("text_column", None, ("sentence", "text")) == "text"
    for flag, given, usual in (("text_column", "txet", ()), ("label_column", None, ("target",))):
        with says(DataError):
            train.column(flag, given, usual)
