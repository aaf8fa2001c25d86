"""A pretrained head keeps its labels with any order in the data, or is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification

from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import ConfigError, DataError, ModelError
from tests.support.messages import Says
from tests.support.texts import Load, write_jsonl

OWN = ("contradiction", "entailment", "neutral")
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def load(tmp_path: Path, load: Load) -> Load:
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
    tagged: bool, spelling: Callable[[str], str], load: Load, tmp_path: Path
) -> None:
    write_declared(tmp_path, [spelling(OWN[i]) for i in (1, 2, 0)], tagged=tagged)
    task = load("token_classification" if tagged else "sequence_classification")
    told = numbers(task)
    assert list(told[0][1:4] if tagged else told) == [1, 2, 0]
    assert [task.labels[i].lower() for i in range(3)] == list(OWN)
    assert not task.notes
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(task.build_model().state_dict()["classifier.weight"], weights["classifier.weight"])


def test_data_without_all_labels_of_the_head_leave_it_whole(load: Load, tmp_path: Path) -> None:
    write_plain(tmp_path, ["neutral", "contradiction"])
    task = load("sequence_classification")
    assert numbers(task) == [2, 0]
    assert task.labels == list(OWN)


def test_as_many_labels_of_other_names_are_refused(load: Load, tmp_path: Path, says: Says) -> None:
    write_plain(tmp_path, ["bad", "good", "odd"])
    with says(DataError):
        load("sequence_classification").build_data()


def test_a_head_without_names_takes_them_in_order_with_a_note(load: Load, tmp_path: Path) -> None:
    write_plain(tmp_path, ["bad", "good"])
    task = load("sequence_classification", ["LABEL_0", "LABEL_1"])
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
    task: str, names: Sequence[str], flags: dict[str, Any], load: Load, tmp_path: Path
) -> None:
    """It is initialised like a head whose weights are missing in the folder, and the body is the pretrained one."""
    write_plain(tmp_path, names)
    trained = load(task, **flags)
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


def test_a_number_takes_no_place_of_a_label(load: Load, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"text": "the cat", "label": 0.5 + i} for i in range(3)])
    task = load("sequence_classification", ["LABEL_0", "LABEL_1"])
    task.build_data()
    assert task.labels == ["LABEL_0"]
    assert task.build_model().state_dict()["classifier.weight"].shape == (1, 16)


def test_a_head_that_is_not_there_cannot_be_left_out(load: Load, tmp_path: Path, says: Says) -> None:
    write_plain(tmp_path, OWN)
    with says(ModelError):
        load("sequence_classification", head=BertForMaskedLM, new_head=True).check()
    with says(ConfigError):
        load("sequence_classification", pretrained_model_name_or_path=None, model_type="bert", new_head=True)


def test_a_model_without_a_head_starts_as_in_transformers(load: Load, tmp_path: Path) -> None:
    write_plain(tmp_path, OWN)
    task = load("sequence_classification", head=BertForMaskedLM)
    assert (numbers(task), task.notes) == ([0, 1, 2], [])  # a body has no labels to follow
    torch.manual_seed(5)
    expected = BertForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3).state_dict()
    torch.manual_seed(5)
    weights = task.build_model().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
