"""Files with bad rows: all of them are one error, or all are left out and counted, for every task."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.data.text.bad_lines import BadLines, add_by_reason, describe_skipped
from rapidformer_templates.data.text.files import data_stem, data_suffix
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, write_jsonl

Load = Callable[..., Task]
GPT_TASKS = ("causal_lm", "preference", "reward")


@pytest.fixture
def load(configure: Callable[..., RunConfig], bert_folder: Path, gpt_folder: Path, tmp_path: Path) -> Load:
    def make(task: str, **flags: Any) -> Task:
        kind, folder = ("gpt2", gpt_folder) if task in GPT_TASKS else ("bert", bert_folder)
        kind = "t5" if task == "seq2seq_lm" else kind
        common = {"data_dir": str(tmp_path), "model_type": kind, "tokenizer_path": str(folder), "seq_length": 24}
        return load_task(configure(task=task, **{**TINY, **common, "validation_fraction": 0.0, **flags}))

    return make


SAY = {"prompt": "say the cat", "chosen": " a dog", "rejected": " the house"}
TALK = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "the cat"}]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    # name: (task, flags, good row, [(bad row, reason)])
    "classes": (
        "sequence_classification", {}, {"text": "the cat", "label": "x"},
        [
            ({"text": "the cat", "label": ""}, "the label in column 'label' is empty"),
            ({"text": " ", "label": "x"}, "the text in column 'text' is empty"),
            ({"text": None, "label": "x"}, "the column 'text' is empty"),
            ({"text": "a", "label": "-100"}, "the label in column 'label' is -100, which is not a label"),
        ],
    ),
    "pairs": (
        "sequence_classification", {"pair_column": "other"}, {"text": "the cat", "other": "a", "label": "x"},
        [({"text": "the cat", "other": "", "label": "x"}, "the text in column 'other' is empty")],
    ),
    "several labels": (
        "sequence_classification", {"problem_type": "multi_label_classification"}, {"text": "a", "label": ["x"]},
        [({"text": "a", "label": None}, "the column 'label' holds None, not a list of labels")],
    ),
    "numbers": (
        "sequence_classification", {"problem_type": "regression"}, {"text": "a", "label": "0.5"},
        [({"text": "a", "label": "n/a"}, "the column 'label' holds 'n/a', which is not a number to predict")],
    ),
    "tags": (
        "token_classification", {}, {"tokens": ["the", "cat"], "tags": ["O", "B-x"]},
        [
            ({"tokens": ["the", "cat"], "tags": ["O"]}, "2 words have 1 tags"),
            ({"tokens": [], "tags": []}, "the text in column 'tokens' is empty"),
            ({"tokens": ["the"], "tags": None}, "the column 'tags' is empty"),
        ],
    ),
    "answers": (
        "question_answering", {},
        {"question": "who", "context": "the cat", "answers": {"text": ["cat"], "answer_start": [4]}},
        [
            ({"question": "who", "context": "the cat", "answers": {"text": ["dog"], "answer_start": [4]}},
             "the answer 'dog' is not at character 4 of the context"),
            ({"question": None, "context": "the cat", "answers": {"text": [], "answer_start": []}},
             "the column 'question' is"),
        ],
    ),
    "texts": ("causal_lm", {}, {"text": "the cat runs"}, [({"text": None}, "the column 'text' is empty")]),
    "chat": (
        "causal_lm", {}, {"messages": TALK},
        [({"messages": TALK[:1]}, "the conversation has no answer: no message is the assistant's")],
    ),
    "instructions": (
        "causal_lm", {}, {"instruction": "say", "output": "the cat"},
        [({"instruction": "say", "output": ""}, "the answer is empty"),
         ({"instruction": "", "output": "a"}, "the instruction is empty")],
    ),
    "masks": ("masked_lm", {}, {"text": "the cat runs"}, [({"text": None}, "the column 'text' is empty")]),
    "targets": (
        "seq2seq_lm", {}, {"source": "the cat", "target": "a dog"},
        [({"source": "the cat", "target": None}, "the column 'target' is empty")],
    ),
    "dpo": (
        "preference", {}, SAY, [({**SAY, "chosen": " the house"}, "the chosen and the rejected answer are the same")],
    ),
    "kto": (
        "preference", {"preference_loss": "kto"}, {"prompt": "say", "completion": " a", "label": "true"},
        [({"prompt": "say", "completion": " a", "label": ""}, "the label is ''"),
         ({"prompt": "say", "completion": "", "label": "true"}, "the completion is empty")],
    ),
    "rewards": (
        "reward", {}, SAY, [({**SAY, "rejected": " a dog"}, "the chosen and the rejected answer are the same")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_task_reports_or_leaves_out_all_bad_rows(case: str, load: Load, tmp_path: Path) -> None:
    task, flags, good, bad = CASES[case]
    other = {**good, "label": "y"} if good.get("label") == "x" else good
    rows = [good, other, *(row for row, _ in bad), good, other]
    file = write_jsonl(tmp_path / "train.jsonl", rows)
    if task != "preference" or "preference_loss" not in flags:
        write_jsonl(tmp_path / "valid.jsonl", [good, bad[0][0]])
    with pytest.raises(DataError) as caught:
        load(task, **flags).build_data()
    places = [line.strip() for line in str(caught.value.where).splitlines()]
    found = " ".join([caught.value.message, *places])
    for number, (_, reason) in enumerate(bad, start=3):
        assert any(place.startswith(f"{file}:{number}") for place in places)
        assert reason in found
    assert (tmp_path / "valid.jsonl").exists() == any(place.startswith(f"{tmp_path}/valid.jsonl:2") for place in places)
    assert "--skip-bad-lines" in str(caught.value.hint)

    skipping = load(task, **flags, skip_bad_lines=True)
    data = skipping.build_data()
    assert len(data.train) == 4  # type: ignore[arg-type]
    skipped = skipping.bad.skipped
    for number, (_, reason) in enumerate(bad, start=3):
        assert any(line.startswith(f"{file}:{number}: {reason}") for line in skipped)
    assert len(skipped) == len(bad) + (tmp_path / "valid.jsonl").exists()


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm", "seq2seq_lm"])
def test_a_stream_leaves_out_the_same_rows(task: str, load: Load, tmp_path: Path) -> None:
    good, empty = {"text": "the cat runs", "target": "a"}, {"text": "", "target": "a"}
    file = write_jsonl(tmp_path / "train.jsonl", [good, empty, good, {"text": None, "target": "a"}])
    flags = {"streaming": True, "shuffle_buffer": 4}
    samples: Any = load(task, **flags, skip_bad_lines=True).build_data().train
    assert len([samples[i] for i in range(8)]) == 8
    counts = samples.bookmark["reasons"]
    assert {line.partition(": ")[2] for line in counts} == {
        "the text in column 'text' is empty", "the column 'text' is empty",
    }  # fmt: skip
    with pytest.raises(DataError, match="the column 'text' is empty") as caught:
        load(task, **flags).build_data().train[0]  # type: ignore[index]
    assert caught.value.where == f"{file}:4"


def test_many_bad_rows_are_counted_and_five_are_shown(load: Load, tmp_path: Path) -> None:
    lines = ["text,label", *(f"the cat,{'xy'[i % 2]}" for i in range(10)), *["a,"] * 6, "b", ",x"]
    (tmp_path / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load("sequence_classification").build_data()
    assert caught.value.message == "8 rows cannot be used"
    shown = str(caught.value.where).splitlines()
    assert shown[0] == f"{tmp_path}/train.csv:18: the line has 1 column, the header has 2"
    assert [line.split(":")[1] for line in shown[1:5]] == ["12", "13", "14", "15"]
    assert shown[5].strip() == "… and 3 more"
    task = load("sequence_classification", skip_bad_lines=True)
    task.build_data()
    assert describe_skipped(add_by_reason({}, task.bad.skipped)) == (
        "left out 8 rows that cannot be used\n"
        f"  6 × the label in column 'label' is empty (first: {tmp_path}/train.csv:12)\n"
        f"  1 × the line has 1 column, the header has 2 (first: {tmp_path}/train.csv:18)\n"
        f"  1 × the text in column 'text' is empty (first: {tmp_path}/train.csv:19)"
    )


def test_rows_are_left_out_before_the_data_are_divided(load: Load, tmp_path: Path) -> None:
    rows = [{"text": "the cat", "label": "xy"[i % 2]} for i in range(20)]
    bad = [{"text": "", "label": "x"}] * 20
    write_jsonl(tmp_path / "train.jsonl", [row for pair in zip(rows, bad, strict=True) for row in pair])
    flags = {"skip_bad_lines": True, "validation_fraction": 0.1, "max_train_samples": 15}
    data = load("sequence_classification", **flags).build_data()
    assert (len(data.train), len(data.valid)) == (15, 2)  # type: ignore[arg-type]


def test_values_of_another_type_and_unknown_labels(load: Load, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "the cat", "label": i % 2} for i in range(4)]
    file = write_jsonl(tmp_path / "train.jsonl", [*rows, {"text": "a", "label": "x"}, {"text": 5, "label": 1}])
    with pytest.raises(DataError, match="2 rows cannot be used") as caught:
        load("sequence_classification").build_data()
    assert f"{file}:5: the column 'label' holds 'x', which has another type" in str(caught.value.where)
    assert f"{file}:6: the column 'text' holds '5', which has another type" in str(caught.value.where)
    task = load("sequence_classification", skip_bad_lines=True)
    assert len(task.build_data().train) == 4  # type: ignore[arg-type]
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "a", "label": label} for label in (0, 7, 1, 8, 7)])
    with pytest.raises(DataError, match="3 rows cannot be used") as caught:
        load("sequence_classification", skip_bad_lines=True).build_data()
    assert "valid.jsonl:2: unknown label '7'" in str(caught.value.where)
    assert "--skip-bad-lines" not in str(caught.value.hint)


def test_a_part_without_a_usable_row(load: Load, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", [{"text": "", "label": "x"}] * 3)
    with pytest.raises(DataError, match="the text in column 'text' is empty, in 3 rows"):
        load("sequence_classification").build_data()
    with pytest.raises(DataError, match="none of the 3 rows can be used; the last: ") as caught:
        load("sequence_classification", skip_bad_lines=True).build_data()
    assert caught.value.where == str(file)


def test_reasons_that_differ_only_in_numbers_count_as_one() -> None:
    lines = ["a.csv:3: the line has 1 column", "b.parquet, row 12: empty", "a.csv:9: the line has 4 columns", "odd"]
    assert add_by_reason({}, lines) == {lines[0]: 2, lines[1]: 1, lines[3]: 1}
    assert add_by_reason({lines[0]: 2}, ["c.csv:1: the line has 7 columns"]) == {lines[0]: 3}
    assert (
        describe_skipped({lines[1]: 1}) == "left out 1 row that cannot be used\n  1 × empty (first: b.parquet, row 12)"
    )


ROWS = [{"text": "a dog; the cat", "label": "x"}, {"text": "größe, 日本", "label": "y"}]


def delimited(delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


FILES: dict[str, bytes] = {
    "semicolons.csv": delimited(";").encode(),
    "tabs.csv": delimited("\t").encode(),
    "utf16.csv": delimited(",").encode("utf-16"),
    "utf16be.csv": b"\xfe\xff" + delimited(",").encode("utf-16-be"),
    "utf16.tsv": delimited("\t").encode("utf-16"),
    "utf32.csv": delimited(";").encode("utf-32"),
    "utf16.jsonl": "\n".join(map(json.dumps, ROWS)).encode("utf-16"),
    "utf16.json": json.dumps(ROWS, ensure_ascii=False).encode("utf-16"),
    "plain.csv.gz": gzip.compress(delimited(",").encode()),
    "PLAIN.TSV.GZ": gzip.compress(delimited("\t").encode()),
    "plain.jsonl.gz": gzip.compress("\n".join(map(json.dumps, ROWS)).encode()),
    "plain.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "utf16.csv.gz": gzip.compress(delimited(";").encode("utf-16")),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_named", [True, False])
def test_forms_of_files(name: str, is_named: bool, configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    place = {"data_dir": str(tmp_path / name) if is_named else str(tmp_path)}
    raw = read_dataset(configure(**place, validation_fraction=0.0))
    assert raw.train.table.to_list() == ROWS
    number = 2 if data_suffix(Path(name)) in (".csv", ".tsv") else 1
    shows_lines = data_suffix(Path(name)) != ".json"
    assert raw.train.where(0) == f"{tmp_path / name}{':' if shows_lines else ', row '}{number}"
    assert data_stem(Path(name)) == name.split(".")[0]


def test_a_file_is_the_training_part(configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Only the named file is read, and a share of it is held out."""
    file = write_jsonl(tmp_path / "train.jsonl", [{"text": str(i)} for i in range(20)])
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "other"}])
    raw = read_dataset(configure(data_dir=str(file), validation_fraction=0.1))
    assert (len(raw.train), len(raw.valid or ())) == (18, 2)
    further = configure(data_dir=str(file), eval_data_name=("hard=valid.jsonl",), validation_fraction=0.1)
    assert {name: len(part) for name, part in read_dataset(further).named.items()} == {"hard": 1}
    with pytest.raises(DataError, match="so there is no data set 'train' in it"):
        read_dataset(configure(data_dir=str(file), data_name="train"))
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match="is not a data file that is read"):
        read_dataset(configure(data_dir=str(tmp_path / "data.xlsx")))


def parquet(columns: dict[str, list[str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("text\na".encode("utf-16-le"), "a.csv", "begins with zero bytes, as UTF-16 without a byte-order mark"),
        (b"text\na", "a.csv.gz", "cannot be decompressed: Not a gzipped file"),
        (gzip.compress(b"text\na" * 99, mtime=0)[:20], "a.csv.gz", "cannot be decompressed: Compressed file ended"),
        ("text\nab".encode("utf-16")[:-1], "a.csv", "the text is not UTF-8"),
        ("größe,text\n1,b".encode("latin1"), "a.csv", "the text is not UTF-8"),
        (b'"te"xt,label\na,b\n', "a.csv", "broken quoting"),
        (b'[{"text": "\xe9"}]', "a.json", "the text is not UTF-8"),
        (b'[{"text": "a"}, ["b"]]', "a.json", "a row must be an object, not list"),
        (b'[{"text": ' + b"9" * 5000 + b"}]", "a.json", "broken JSON: a number that is too long"),
        (b'[{"text": ' + b"[" * 100_000, "a.json", "brackets that are nested too deeply"),
        (b'[{"text": "a", "half \\ud83d": 1}]', "a.json", r"the column 'half \\ud83d' cannot be read"),
        (b'{"text": "a", "zero \\u0000": 1}', "a.jsonl", r"the column 'zero \\x00' cannot be read"),
        (b'[{"text": {"\\u0000": [], "": {}}}]', "a.json", "the rows cannot be read as a table"),
        (b"text,la\0bel\na,b\n", "a.csv", "the header holds a zero byte"),
        (b"PAR1 is not enough PAR1", "a.parquet", "the file is not Parquet"),
        (parquet({"text": ["a"]}).replace(b"text", b"te\xabt"), "a.parquet", "the file is not Parquet: 'utf-8' codec"),
    ],
)
def test_files_that_cannot_be_read(
    content: bytes, name: str, message: str, configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_dataset(configure(data_dir=str(tmp_path)), BadLines())
    assert str(caught.value.where).startswith(str(tmp_path / name))
