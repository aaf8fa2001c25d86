"""Labels that mean "no label", labels that are numbers, parts that no run reads, and labels of a pretrained head."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification

from rapidformer_templates.data.finetuning.labels import sorted_names
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import ConfigError, DataError, ModelError
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


OWN = ("contradiction", "entailment", "neutral")
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def headed(tmp_path: Path, load: Load) -> Load:
    """Return a loader of tasks for ``tmp_path/data``. Their pretrained head has :data:`OWN` or other labels."""

    def make(task: str, labels: Sequence[str] = OWN, head: Any = None, **flags: Any) -> Task:
        kind = head or (BertForSequenceClassification if task != "token_classification" else BertForTokenClassification)
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
        torch.manual_seed(0)
        kind(BertConfig(num_labels=len(labels), **names, **SIZES)).save_pretrained(tmp_path / "model")
        folders = {"data_dir": "data", "pretrained_model_name_or_path": "model"}
        return load(task, **{flag: str(tmp_path / name) for flag, name in folders.items()} | flags)

    return make


def write_declared(folder: Path, names: Sequence[str], *, tagged: bool = False) -> None:
    """Save a data set that contains each label once and declares the names."""
    label = datasets.ClassLabel(names=list(names))
    if tagged:
        features = {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(label)}
        rows = [{"tokens": ["the"] * len(names), "ner_tags": list(range(len(names)))}]
    else:
        features = {"text": datasets.Value("string"), "label": label}
        rows = [{"text": "the cat", "label": i} for i in range(len(names))]
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    datasets.DatasetDict(train=table).save_to_disk(str(folder / "data"))


def write_plain(folder: Path, names: Sequence[str]) -> None:
    (folder / "data").mkdir()
    write_jsonl(folder / "data" / "train.jsonl", [{"text": "the cat", "label": name} for name in names])


def numbers(task: Task) -> Any:
    return [sample["labels"] for sample in task.build_data().train]


@pytest.mark.parametrize("spelling", [str, str.upper])
@pytest.mark.parametrize("tagged", [False, True])
def test_declared_labels_take_the_places_that_the_head_gives_them(
    tagged: bool, spelling: Callable[[str], str], headed: Load, tmp_path: Path
) -> None:
    write_declared(tmp_path, [spelling(OWN[i]) for i in (1, 2, 0)], tagged=tagged)
    task = headed("token_classification" if tagged else "sequence_classification")
    told = numbers(task)
    assert list(told[0][1:4] if tagged else told) == [1, 2, 0]
    assert [task.labels[i].lower() for i in range(3)] == list(OWN)
    assert not task.notes
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(task.build_model().state_dict()["classifier.weight"], weights["classifier.weight"])


@pytest.mark.parametrize(("tagged", "several"), [(False, False), (True, False), (False, True)])
def test_an_evaluation_reads_labels_in_any_case_as_a_training_does(
    tagged: bool, several: bool, headed: Load, tmp_path: Path
) -> None:
    names = [OWN[i].title() for i in (1, 2, 0)]
    if several:
        (tmp_path / "data").mkdir()
        write_jsonl(tmp_path / "data/train.jsonl", [{"text": "the cat", "label": [name]} for name in names])
    else:
        write_declared(tmp_path, names, tagged=tagged)
    flags = {"problem_type": "multi_label_classification"} if several else {}
    trained, evaluated = (
        headed("token_classification" if tagged else "sequence_classification", **flags) for _ in "ab"
    )
    evaluated.load_label_state({})
    np.testing.assert_equal(numbers(evaluated), numbers(trained))
    evaluated.load_label_state({"labels": [*OWN, "Neutral"]})  # its labels differ only in case
    with pytest.raises(DataError, match="unknown label 'Entailment'"):
        evaluated.build_data()


def test_data_without_all_labels_of_the_head_leave_it_whole(headed: Load, tmp_path: Path) -> None:
    write_plain(tmp_path, ["neutral", "contradiction"])
    task = headed("sequence_classification")
    assert numbers(task) == [2, 0]
    assert task.labels == list(OWN)


def test_as_many_labels_of_other_names_are_refused(headed: Load, tmp_path: Path, says: Says) -> None:
    write_plain(tmp_path, ["bad", "good", "odd"])
    with says(DataError):
        headed("sequence_classification").build_data()


def test_a_head_without_names_takes_them_in_order_with_a_note(headed: Load, tmp_path: Path) -> None:
    write_plain(tmp_path, ["bad", "good"])
    task = headed("sequence_classification", ["LABEL_0", "LABEL_1"])
    assert numbers(task) == [0, 1]
    assert task.notes == ["the model does not name its labels, so its outputs mean bad, good, in this order"]


@pytest.mark.parametrize(
    ("task", "names", "flags"),
    [
        ("sequence_classification", ["bad", "good", "odd"], {"new_head": True}),
        ("sequence_classification", ["bad", "good"], {}),
        ("sequence_classification", OWN, {"head": BertForTokenClassification}),
    ],
)
def test_a_new_head_is_that_of_a_model_without_one(
    task: str, names: Sequence[str], flags: dict[str, Any], headed: Load, tmp_path: Path
) -> None:
    """It is initialised like a head whose weights are missing in the folder, and the body is the pretrained one."""
    write_plain(tmp_path, names)
    trained = headed(task, **flags)
    trained.build_data()
    assert trained.labels == list(names)
    assert bool(trained.notes) == (len(names) != len(OWN))
    torch.manual_seed(1)
    weights = trained.build_model().state_dict()
    there = load_file(tmp_path / "model" / "model.safetensors")
    body = {name for name in there if name.startswith("bert.")}
    assert len(body) > 10
    assert all(torch.equal(weights[name], there[name]) for name in body)
    head = weights["classifier.weight"]
    assert head.shape == (len(names), 16)
    assert len(names) != len(OWN) or not torch.equal(head, there["classifier.weight"])
    assert 0.01 < head.std() < 0.03  # BERT initialises with 0.02
    assert torch.equal(weights["classifier.bias"], torch.zeros(len(names)))


def test_a_number_takes_no_place_of_a_label(headed: Load, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"text": "the cat", "label": 0.5 + i} for i in range(3)])
    task = headed("sequence_classification", ["LABEL_0", "LABEL_1"])
    task.build_data()
    assert task.labels == ["LABEL_0"]
    assert task.build_model().state_dict()["classifier.weight"].shape == (1, 16)


def test_a_head_that_is_not_there_cannot_be_left_out(headed: Load, tmp_path: Path, says: Says) -> None:
    write_plain(tmp_path, OWN)
    with says(ModelError):
        headed("sequence_classification", head=BertForMaskedLM, new_head=True).check()
    with says(ConfigError):
        headed("sequence_classification", pretrained_model_name_or_path=None, model_type="bert", new_head=True)


def test_a_model_without_a_head_starts_as_in_transformers(headed: Load, tmp_path: Path) -> None:
    write_plain(tmp_path, OWN)
    task = headed("sequence_classification", head=BertForMaskedLM)
    assert (numbers(task), task.notes) == ([0, 1, 2], [])  # a body has no labels to follow
    torch.manual_seed(5)
    expected = BertForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3).state_dict()
    torch.manual_seed(5)
    weights = task.build_model().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
