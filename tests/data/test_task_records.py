"""Each record of a task is compared with the task that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from rapidformer_templates.data.streaming import StreamedSamples
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.data.types import Batch
from rapidformer_templates.planning.config import RunConfig, field_types, value_kind
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.tasks import TASKS, TaskFacts, tasks_with
from tests.support.texts import TINY, write_jsonl

Configure = Callable[..., RunConfig]
ROWS = 6
PAIR = {"prompt": "the cat", "chosen": " sees a tree", "rejected": " eats"}
QUESTION = {
    "question": "the cat",
    "context": "big tree " * 60,
    "answers": {"text": ["tree"], "answer_start": [4]},
}
CHOICES = {"context": "the cat", "choices": ["sees a tree", "a", "b", "c"], "label": 2}
SOURCES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sequence_classification": ("bert", {"text": "a cat", "label": "x"}),
    "token_classification": ("bert", {"tokens": ["the", "cat"], "ner_tags": ["O", "B-X"]}),
    "question_answering": ("bert", QUESTION),
    "multiple_choice": ("bert", CHOICES),
    "masked_lm": ("bert", {"text": "the cat sees a tree"}),
    "causal_lm": ("gpt2", {"text": "the cat sees a tree"}),
    "seq2seq_lm": ("t5", {"source": "the cat", "target": "sees a tree under the big house"}),
    "preference": ("gpt2", PAIR),
    "reward": ("gpt2", PAIR),
}
"""An architecture and a row of data for each task of fine-tuning."""

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SOURCES),
    ("preference", {"preference_loss": "kto"}),
]


@pytest.fixture
def task_of(tmp_path: Path, configure: Configure, bert_folder: Path, gpt_folder: Path) -> Callable[..., Task]:
    """Return a function that loads a task for a few rows."""

    def make(name: str, **flags: Any) -> Task:
        architecture, row = SOURCES[name]
        labels = [{"label": "xy"[i % 2]} if name == "sequence_classification" else {} for i in range(ROWS)]
        write_jsonl(tmp_path / "train.jsonl", [row | label for label in labels])
        tokenizer = bert_folder if architecture == "bert" else gpt_folder
        common = {"data_dir": str(tmp_path), "model_type": architecture, "tokenizer_path": str(tokenizer)}
        return load_task(configure(task=name, validation_fraction=0.0, **(TINY | {"seq_length": 32} | common | flags)))

    return make


def _read(task: Task) -> tuple[int, Batch]:
    """Return the number of samples, and a batch of the first four."""
    data = task.build_data()
    samples: Any = data.train
    first = [samples[i] for i in range(4)]
    if data.augment:
        first = [data.augment(sample, np.random.default_rng(0)) for sample in first]
    assert data.collate is not None
    batch: Batch = data.collate(first)
    return len(samples), batch


# The records


def test_no_field_of_a_record_can_be_forgotten() -> None:
    assert [f.name for f in fields(TaskFacts) if f.default is not MISSING or f.default_factory is not MISSING] == []


def test_the_flag_has_the_names_of_the_records() -> None:
    assert value_kind(field_types(TrainingFlags)["task"])[1] == tuple(TASKS)
    assert all(name == facts.name for name, facts in TASKS.items())


def test_the_tasks_of_fine_tuning_are_read_below() -> None:
    assert SOURCES.keys() == TASKS.keys() - {"pretraining"}


def test_the_columns_of_predictions_are_known() -> None:
    """Rewards are predicted for conversations, or for pairs of answers, which have no single column."""
    assert set(tasks_with(lambda task: bool(task.input_columns))) == TASKS.keys() - {"pretraining", "reward"}


@pytest.mark.parametrize("name", TASKS)
def test_what_a_record_names_is_there(name: str) -> None:
    facts, kind = TASKS[name], load_object(TASKS[name].implementation)
    flags = {f.name for f in REGISTRY.complete(RunConfig()).fields()}
    assert issubclass(kind, Task)
    assert kind.name == name
    assert {*facts.own_flags, *facts.data_flags} <= flags
    assert len(set(facts.metrics)) == len(facts.metrics) > 0


def test_a_name_of_a_class_belongs_to_one_task() -> None:
    ends = [end for facts in TASKS.values() for end in facts.model_classes]
    assert len(ends) == len(set(ends))
    assert not [end for end in ends for other in ends if end != other and end.endswith(other)]


# The tasks


@pytest.mark.parametrize("name", tasks_with(lambda task: task.model_classes != ()))
def test_classes_of_models_have_the_names_of_the_record(name: str) -> None:
    auto_class = load_object(TASKS[name].implementation).auto_class
    config = transformers.CONFIG_MAPPING[SOURCES[name][0]]
    kind = getattr(transformers, auto_class)._model_mapping[config]
    assert kind.__name__.endswith(TASKS[name].model_classes)


@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_samples_are_what_the_record_says(name: str, flags: dict[str, Any], task_of: Callable[..., Task]) -> None:
    facts = TASKS[name]
    count, batch = _read(task_of(name, **flags))
    is_unpaired = "preference_loss" in flags
    if facts.rows_are_samples:
        assert count == ROWS
    elif name == "question_answering" or is_unpaired:
        assert count > ROWS
    inputs, labels = batch["input_ids"], batch.get("labels")
    assert len(inputs) == (8 if facts.compares_answers and not is_unpaired else 4)
    if facts.has_lengths:
        assert labels is not None
        assert not labels.is_floating_point()
        assert labels.shape in (inputs.shape, inputs.shape[:1])
    else:
        assert facts.compares_answers or labels is None or labels.shape != inputs.shape


@pytest.mark.parametrize("name", SOURCES)
def test_plans_know_the_shapes_of_batches(name: str, task_of: Callable[..., Task]) -> None:
    task = task_of(name)
    _, batch = _read(task)
    rows, tokens = 4 * TASKS[name].rows_per_sample, batch["input_ids"].shape[-1]
    planned = task.planned_batch(rows, tokens)
    assert planned.keys() == batch.keys() - {"token_type_ids", "counted"}
    for field, tensor in planned.items():
        if name == "seq2seq_lm" and field == "labels":
            continue  # the target's length is not known
        if name == "reward" and field == "labels":
            continue  # its loss reads no labels
        assert tensor.shape == batch[field].shape, field


@pytest.mark.parametrize("name", [name for name in SOURCES if TASKS[name].is_streamed])
def test_tasks_that_can_read_row_by_row_do(name: str, task_of: Callable[..., Task]) -> None:
    assert isinstance(task_of(name, streaming=True).build_data().train, StreamedSamples)


@pytest.mark.parametrize("name", SOURCES)
def test_heads_are_for_what_the_record_says(name: str) -> None:
    facts, kind = TASKS[name], load_object(TASKS[name].implementation)
    assert facts.continues_text == (kind.auto_class == "AutoModelForCausalLM")
    words = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
    assert facts.predicts_tokens == (kind.auto_class in words and not facts.compares_answers)


@pytest.mark.parametrize("name", ["sequence_classification", "token_classification", "causal_lm", "seq2seq_lm"])
def test_the_loss_is_the_cross_entropy_that_can_be_smoothed(name: str, task_of: Callable[..., Task]) -> None:
    assert TASKS[name].is_smoothed
    task = task_of(name)
    _, batch = _read(task)
    model = task.build_model().eval()
    with torch.no_grad():
        loss = task.compute_loss(model, batch)
        logits = model(**batch).logits
    labels = batch["labels"]
    if name == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    expected = functional.cross_entropy(logits.flatten(0, -2).double(), labels.flatten())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
