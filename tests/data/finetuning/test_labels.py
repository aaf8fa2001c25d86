"""Labels that mean "no label", labels that are numbers, and parts that no run reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from rapidformer_templates.data.finetuning.labels import sorted_names
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, write_jsonl

Load = Callable[..., Task]
NAMES = datasets.ClassLabel(names=["neg", "pos", "last"])
TEXTS = datasets.Features({"sentence": datasets.Value("string"), "label": NAMES})
TAGGED = datasets.Features(
    {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(NAMES)}
)


@pytest.fixture
def load(tmp_path: Path, configure: Callable[..., RunConfig], bert_folder: Path) -> Load:
    """Return a function that loads a task for the data set in ``tmp_path``."""

    def make(task: str, **flags: Any) -> Task:
        common = {"data_dir": str(tmp_path), "model_type": "bert", "tokenizer_path": str(bert_folder), **TINY}
        return load_task(configure(task=task, **(common | flags)))

    return make


def save(folder: Path, features: datasets.Features, **parts: list[dict[str, Any]]) -> None:
    tables = {name: datasets.Dataset.from_list(rows, features=features) for name, rows in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(str(folder))


def glue(*labels: int) -> list[dict[str, Any]]:
    return [{"sentence": "the cat", "label": label} for label in labels]


def test_a_part_that_no_run_reads_cannot_stop_it(load: Load, tmp_path: Path) -> None:
    """The test parts of GLUE have the label -1."""
    save(tmp_path, TEXTS, train=glue(0, 1, 2), validation=glue(1, 0), test=glue(-1, -1))
    data = load("sequence_classification").build_data()
    assert data.valid is not None
    assert [sample["labels"] for sample in data.valid] == [1, 0]
    for file in (tmp_path / "test").glob("*.arrow"):
        file.write_bytes(b"damaged")
    assert load("sequence_classification").build_data().test is None


def test_a_test_file_is_not_read(load: Load, tmp_path: Path) -> None:
    for part in ("train", "valid"):
        write_jsonl(tmp_path / f"{part}.jsonl", [{"text": "the cat", "label": i} for i in range(3)])
    (tmp_path / "test.jsonl").write_bytes(b"\xff{")
    (tmp_path / "test.csv").write_text("", encoding="utf-8")
    assert load("sequence_classification").build_data().test is None


@pytest.mark.parametrize("none", [-1, -100])
def test_a_text_without_a_label_is_named(load: Load, tmp_path: Path, none: int) -> None:
    rows = glue(0, 1, 2)
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_list([*rows, {"sentence": "a", "label": none}], features=features)
    table.info.features["label"] = NAMES  # written without checking the values, as older versions did
    datasets.DatasetDict({"train": table, "validation": table.select(range(3))}).save_to_disk(str(tmp_path))
    with pytest.raises(DataError) as caught:
        load("sequence_classification").build_data()
    assert caught.value.message == f"the label in column 'label' is {none}, which is not a label"
    assert caught.value.where == f"{tmp_path / 'train'}, row 4"


@pytest.mark.parametrize("none", [-1, -100])
def test_a_word_without_a_tag_is_no_target(load: Load, tmp_path: Path, none: int) -> None:
    row = {"tokens": ["the", "cat", "sleeps"], "ner_tags": [0, 0, 1]}
    features = datasets.Features({**TAGGED, "ner_tags": datasets.Sequence(datasets.Value("int64"))})
    marked = {**row, "ner_tags": [0, none, 1]}
    table = datasets.Dataset.from_list([row, marked], features=features).cast(TAGGED)
    datasets.DatasetDict({"train": table, "validation": table}).save_to_disk(str(tmp_path))
    task = load("token_classification")
    data = task.build_data()
    assert data.train is not None
    whole, gap = (data.train[i]["labels"].tolist() for i in range(2))
    assert [label for label in whole if label != -100] == [0, 0, 1]
    assert [label for label in gap if label != -100] == [0, 1]
    assert task.config_overrides()["num_labels"] == 3


def test_ignored_tags_without_names_are_no_class(load: Load, tmp_path: Path) -> None:
    """Losses ignore -100. But -1 may be a class in files, which do not declare names."""
    write_jsonl(tmp_path / "train.jsonl", [{"tokens": ["the", "cat", "on"], "tags": [-1, -100, 1]}] * 4)
    task = load("token_classification")
    data = task.build_data()
    assert task.config_overrides()["id2label"] == {0: "-1", 1: "1"}
    assert data.train is not None
    assert [label for label in data.train[0]["labels"] if label != -100] == [0, 1]


def test_a_label_beyond_the_declared_names(load: Load, tmp_path: Path) -> None:
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_list(glue(0, 1, 7), features=features)
    table.info.features["label"] = NAMES
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="the label in column 'label' is 7; 3 names are declared") as caught:
        load("sequence_classification", validation_fraction=0.0).build_data()
    assert caught.value.where == f"{tmp_path / 'train'}, row 3"


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_measures_are_no_classes(load: Load, tmp_path: Path, kind: str) -> None:
    values = [1.0, 3.25, 0.5, 2.0]
    if kind == "jsonl":
        write_jsonl(tmp_path / "train.jsonl", [{"text": "the cat", "label": value} for value in values])
    else:
        (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a,{v}\n" for v in values), encoding="utf-8")
    asked = {"problem_type": "single_label_classification", "validation_fraction": 0.0}
    with pytest.raises(DataError) as caught:
        load("sequence_classification", **asked).build_data()
    assert caught.value.message == "the column 'label' holds measures, such as 3.25, not classes"
    assert caught.value.where == f"{tmp_path}/train.{kind}:{2 if kind == 'jsonl' else 3}"
    assert caught.value.hint == (
        "learn them with --problem-type regression; if these numbers are classes, give them names, such as 'class 3.25'"
    )
    task = load("sequence_classification", validation_fraction=0.0)
    task.build_data()
    assert task.config_overrides()["problem_type"] == "regression"


def test_numbers_among_names_are_classes(load: Load, tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in ("0.5", "unknown", "3")]
    write_jsonl(tmp_path / "train.jsonl", rows)
    task = load("sequence_classification", validation_fraction=0.0)
    task.build_data()
    assert task.config_overrides()["num_labels"] == 3


def test_digits_that_are_not_numbers(load: Load, tmp_path: Path) -> None:
    """``"²".isdigit()`` is true, but ``int("²")`` fails. Names of equal numbers have one order."""
    assert sorted_names(["²", "10", "9"]) == ["10", "9", "²"]
    assert sorted_names(["10", "--9"]) == ["--9", "10"]
    assert sorted_names(["٣", "3", "03", "-1"]) == ["-1", "03", "3", "٣"]
    write_jsonl(tmp_path / "train.jsonl", [{"text": "the cat", "label": name} for name in ("²", "³", "²")])
    task = load("sequence_classification", validation_fraction=0.0)
    assert [sample["labels"] for sample in task.build_data().train] == [0, 1, 0]
    assert task.labels == ["²", "³"]
