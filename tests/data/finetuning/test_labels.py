"""Labels that mean "no label", labels that are numbers, and parts that no run reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from rapidformer_templates.data.finetuning.labels import sorted_names
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import Load, write_jsonl

NAMES = datasets.ClassLabel(names=["neg", "pos", "last"])
TEXTS = datasets.Features({"sentence": datasets.Value("string"), "label": NAMES})
TAGGED = datasets.Features(
    {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(NAMES)}
)


def save(folder: Path, features: datasets.Features, **parts: list[dict[str, Any]]) -> None:
    tables = {name: datasets.Dataset.from_list(rows, features=features) for name, rows in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(str(folder))


def glue(*labels: int) -> list[dict[str, Any]]:
    return [{"sentence": "the cat", "label": label} for label in labels]


def test_a_part_that_no_run_reads_cannot_stop_it(load: Load, tmp_path: Path) -> None:
    """The test parts of GLUE have the label -1."""
    save(tmp_path, TEXTS, train=glue(0, 1, 2), validation=glue(1, 0), test=glue(-1, -1))
    data: Any = load("sequence_classification").build_data()
    assert [sample["labels"] for sample in data.valid] == [1, 0]
    for file in (tmp_path / "test").glob("*.arrow"):
        file.write_bytes(b"damaged")
    assert load("sequence_classification").build_data().test is None


def test_a_test_file_is_not_read(load: Load, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(b"\xff{")
    (tmp_path / "test.csv").write_text("", encoding="utf-8")
    rows = [{"text": "the cat", "label": i} for i in range(3)]
    assert load("sequence_classification", rows, rows).build_data().test is None


@pytest.mark.parametrize("label", [-1, -100, 7])
def test_a_label_that_is_none_of_the_declared_names(load: Load, tmp_path: Path, label: int, says: Says) -> None:
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_list(glue(0, 1, 2, label), features=features)
    table.info.features["label"] = NAMES  # written without checking the values, as older versions did
    datasets.DatasetDict({"train": table, "validation": table.select(range(3))}).save_to_disk(str(tmp_path))
    with says(DataError):
        load("sequence_classification").build_data()


@pytest.mark.parametrize("none", [-1, -100])
def test_a_word_without_a_tag_is_no_target(load: Load, tmp_path: Path, none: int) -> None:
    row = {"tokens": ["the", "cat", "sleeps"], "ner_tags": [0, 0, 1]}
    features = datasets.Features({**TAGGED, "ner_tags": datasets.Sequence(datasets.Value("int64"))})
    marked = {**row, "ner_tags": [0, none, 1]}
    table = datasets.Dataset.from_list([row, marked], features=features).cast(TAGGED)
    datasets.DatasetDict({"train": table, "validation": table}).save_to_disk(str(tmp_path))
    task = load("token_classification")
    found = [[label for label in sample["labels"] if label != -100] for sample in task.build_data().train or ()]  # type: ignore[attr-defined]
    assert found == [[0, 0, 1], [0, 1]]
    assert task.config_overrides()["num_labels"] == 3


def test_ignored_tags_without_names_are_no_class(load: Load) -> None:
    """Losses ignore -100. But -1 may be a class in files, which do not declare names."""
    task = load("token_classification", [{"tokens": ["the", "cat", "on"], "tags": [-1, -100, 1]}] * 4)
    data: Any = task.build_data()
    assert task.config_overrides()["id2label"] == {0: "-1", 1: "1"}
    assert [label for label in data.train[0]["labels"] if label != -100] == [0, 1]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_measures_are_no_classes(load: Load, tmp_path: Path, kind: str, says: Says) -> None:
    values = [1.0, 3.25, 0.5, 2.0]
    if kind == "jsonl":
        write_jsonl(tmp_path / "train.jsonl", [{"text": "the cat", "label": value} for value in values])
    else:
        (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a,{v}\n" for v in values), encoding="utf-8")
    with says(DataError):
        load("sequence_classification", problem_type="single_label_classification").build_data()
    task = load("sequence_classification")
    task.build_data()
    assert task.config_overrides()["problem_type"] == "regression"


def test_numbers_among_names_are_classes(load: Load) -> None:
    task = load("sequence_classification", [{"text": "a", "label": label} for label in ("0.5", "unknown", "3")])
    task.build_data()
    assert task.config_overrides()["num_labels"] == 3


def test_digits_that_are_not_numbers(load: Load) -> None:
    """``"²".isdigit()`` is true, but ``int("²")`` fails. Names of equal numbers have one order."""
    assert sorted_names(["²", "10", "9"]) == ["10", "9", "²"]
    assert sorted_names(["10", "--9"]) == ["--9", "10"]
    assert sorted_names(["٣", "3", "03", "-1"]) == ["-1", "03", "3", "٣"]
    task = load("sequence_classification", [{"text": "the cat", "label": name} for name in ("²", "³", "²")])
    assert [sample["labels"] for sample in task.build_data().train or ()] == [0, 1, 0]  # type: ignore[attr-defined]
    assert task.labels == ["²", "³"]
