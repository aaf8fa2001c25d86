"""Files with bad rows: all of them are one error, or all are left out and counted, for every task."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.data.text.bad_lines import add_by_reason, describe_skipped
from rapidformer_templates.data.text.files import data_stem, data_suffix
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.messages import Says
from tests.support.texts import Load, write_jsonl

SAY = {"prompt": "say the cat", "chosen": " a dog", "rejected": " the house"}
TALK = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "the cat"}]


def answered(*answer: str) -> dict[str, list[Any]]:
    return {"text": list(answer), "answer_start": [4] * len(answer)}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    # name: (task, flags, good row, bad rows)
    "classes": (
        "sequence_classification", {}, {"text": "the cat", "label": "x"},
        [{"text": "the cat", "label": ""}, {"text": " ", "label": "x"}, {"text": None, "label": "x"},
         {"text": "a", "label": "-100"}],
    ),
    "pairs": (
        "sequence_classification", {"pair_column": "other"}, {"text": "the cat", "other": "a", "label": "x"},
        [{"text": "the cat", "other": "", "label": "x"}],
    ),
    "several labels": (
        "sequence_classification", {"problem_type": "multi_label_classification"}, {"text": "a", "label": ["x"]},
        [{"text": "a", "label": None}],
    ),
    "numbers": (
        "sequence_classification", {"problem_type": "regression"}, {"text": "a", "label": "0.5"},
        [{"text": "a", "label": "n/a"}, {"text": "a", "label": None}],
    ),
    "tags": (
        "token_classification", {}, {"tokens": ["the", "cat"], "tags": ["O", "B-x"]},
        [{"tokens": ["the", "cat"], "tags": ["O"]}, {"tokens": [], "tags": []}, {"tokens": ["the"], "tags": None}],
    ),
    "answers": (
        "question_answering", {}, {"question": "who", "context": "the cat", "answers": answered("cat")},
        [{"question": "who", "context": "the cat", "answers": answered("dog")},
         {"question": None, "context": "the cat", "answers": answered()}],
    ),
    "texts": ("causal_lm", {}, {"text": "the cat runs"}, [{"text": None}]),
    "chat": ("causal_lm", {}, {"messages": TALK}, [{"messages": TALK[:1]}]),
    "instructions": (
        "causal_lm", {}, {"instruction": "say", "output": "the cat"},
        [{"instruction": "say", "output": ""}, {"instruction": "", "output": "a"}],
    ),
    "masks": ("masked_lm", {}, {"text": "the cat runs"}, [{"text": None}]),
    "targets": ("seq2seq_lm", {}, {"source": "the cat", "target": "a dog"}, [{"source": "the cat", "target": None}]),
    "dpo": ("preference", {}, SAY, [{**SAY, "chosen": " the house"}]),
    "kto": (
        "preference", {"preference_loss": "kto"}, {"prompt": "say", "completion": " a", "label": "true"},
        [{"prompt": "say", "completion": " a", "label": ""}, {"prompt": "say", "completion": "", "label": "true"}],
    ),
    "rewards": ("reward", {}, SAY, [{**SAY, "rejected": " a dog"}]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_task_reports_or_leaves_out_all_bad_rows(case: str, load: Load, says: Says) -> None:
    task, flags, good, bad = CASES[case]
    other = {**good, "label": "y"} if good.get("label") == "x" else good
    valid = [good, bad[0]] if case != "kto" else []
    with says(DataError):
        load(task, [good, other, *bad, good, other], valid, **flags, seq_length=24).build_data()
    skipping = load(task, **flags, seq_length=24, skip_bad_lines=True)
    assert len(skipping.build_data().train) == 4  # type: ignore[arg-type]
    says.text("\n".join(skipping.bad.skipped))


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm", "seq2seq_lm"])
def test_a_stream_leaves_out_the_same_rows(task: str, load: Load, says: Says) -> None:
    good, empty = {"text": "the cat runs", "target": "a"}, {"text": "", "target": "a"}
    flags = {"streaming": True, "shuffle_buffer": 4}
    rows = [good, empty, good, {"text": None, "target": "a"}]
    samples: Any = load(task, rows, **flags, skip_bad_lines=True).build_data().train
    assert len([samples[i] for i in range(8)]) == 8
    says.text("\n".join(samples.bookmark["reasons"]))
    with says(DataError):
        load(task, **flags).build_data().train[0]  # type: ignore[index]


def test_many_bad_rows_are_counted_and_five_are_shown(load: Load, tmp_path: Path, says: Says) -> None:
    lines = ["text,label", *(f"the cat,{'xy'[i % 2]}" for i in range(10)), *["a,"] * 6, "b", ",x"]
    (tmp_path / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    with says(DataError):
        load("sequence_classification").build_data()
    task = load("sequence_classification", skip_bad_lines=True)
    task.build_data()
    says.text(describe_skipped(add_by_reason({}, task.bad.skipped)))


def test_rows_are_left_out_before_the_data_are_divided(load: Load) -> None:
    rows = [{"text": "the cat" * (i % 2), "label": "xy"[i // 2 % 2]} for i in range(40)]
    flags = {"skip_bad_lines": True, "validation_fraction": 0.1, "max_train_samples": 15}
    data: Any = load("sequence_classification", rows, **flags).build_data()
    assert (len(data.train), len(data.valid)) == (15, 2)


def test_values_of_another_type_and_unknown_labels(load: Load, says: Says) -> None:
    rows: list[dict[str, Any]] = [{"text": "the cat", "label": i % 2} for i in range(4)]
    with says(DataError):
        load("sequence_classification", [*rows, {"text": "a", "label": "x"}, {"text": 5, "label": 1}]).build_data()
    assert len(load("sequence_classification", skip_bad_lines=True).build_data().train) == 4  # type: ignore[arg-type]
    valid = [{"text": "a", "label": label} for label in (0, 7, 1, 8, 7)]
    with says(DataError):
        load("sequence_classification", valid=valid, skip_bad_lines=True).build_data()


def test_a_part_without_a_usable_row(load: Load, says: Says) -> None:
    for skips in (False, True):
        with says(DataError):
            load("sequence_classification", [{"text": "", "label": "x"}] * 3, skip_bad_lines=skips).build_data()


def test_reasons_that_differ_only_in_numbers_count_as_one() -> None:
    lines = ["a.csv:3: the line has 1 column", "b.parquet, row 12: empty", "a.csv:9: the line has 4 columns", "odd"]
    assert add_by_reason({}, lines) == {lines[0]: 2, lines[1]: 1, lines[3]: 1}
    assert add_by_reason({lines[0]: 2}, ["c.csv:1: the line has 7 columns"]) == {lines[0]: 3}


ROWS = [{"text": "a dog; the cat", "label": "x"}, {"text": "größe, 日本", "label": "y"}]


def delimited(delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


BY_LINES = "\n".join(map(json.dumps, ROWS))
FILES: dict[str, bytes] = {
    "semicolons.csv": delimited(";").encode(),
    "utf16.csv": delimited(",").encode("utf-16"),
    "utf16be.csv": b"\xfe\xff" + delimited(",").encode("utf-16-be"),
    "utf16.tsv": delimited("\t").encode("utf-16"),
    "utf32.csv": delimited(";").encode("utf-32"),
    "utf16.jsonl": BY_LINES.encode("utf-16"),
    "utf16.json": json.dumps(ROWS, ensure_ascii=False).encode("utf-16"),
    "PLAIN.TSV.GZ": gzip.compress(delimited("\t").encode()),
    "plain.jsonl.gz": gzip.compress(BY_LINES.encode()),
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


def test_a_file_is_the_training_part(configure: Callable[..., RunConfig], tmp_path: Path, says: Says) -> None:
    """Only the named file is read, and a share of it is held out."""
    file = write_jsonl(tmp_path / "train.jsonl", [{"text": str(i)} for i in range(20)])
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "other"}])
    raw = read_dataset(configure(data_dir=str(file), validation_fraction=0.1))
    assert (len(raw.train), len(raw.valid or ())) == (18, 2)
    further = configure(data_dir=str(file), eval_data_name=("hard=valid.jsonl",), validation_fraction=0.1)
    assert {name: len(part) for name, part in read_dataset(further).named.items()} == {"hard": 1}
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    for flags in ({"data_dir": str(file), "data_name": "train"}, {"data_dir": str(tmp_path / "data.xlsx")}):
        with says(DataError):
            read_dataset(configure(**flags))
