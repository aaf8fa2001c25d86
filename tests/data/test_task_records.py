"""Each record of a task is compared with the task that it names. Rendered texts have their special tokens once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import processors
from transformers import AutoTokenizer

from rapidformer_templates.data.finetuning.chat_samples import added_tokens, once
from rapidformer_templates.data.streaming import StreamedSamples
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.tasks.base import tokenized
from rapidformer_templates.data.types import Batch
from rapidformer_templates.planning.config import RunConfig, field_types, value_kind
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.tasks import TASKS, tasks_with
from rapidformer_templates.run.predictions import samples_as_part
from tests.support.texts import ARCHITECTURES, ROW_OF, Load

ROWS = 6
MORE: dict[str, dict[str, Any]] = {
    "question_answering": {"context": "big tree " * 60, "answers": {"text": ["tree"], "answer_start": [4]}},
    "multiple_choice": {"choices": ["sees a tree", "a", "b", "c"]},
}


@pytest.fixture
def task_of(load: Load) -> Load:
    """Return a function that loads a task for a few rows."""

    def make(name: str, **flags: Any) -> Task:
        rows = [ROW_OF[name](text) | MORE.get(name, {}) for text in ("the cat sees", "the cat eats it") * (ROWS // 2)]
        return load(name, rows, **{"seq_length": 32} | flags)

    return make


def _read(task: Task) -> tuple[int, Batch]:
    """Return the number of samples, and a batch of the first four."""
    data: Any = task.build_data()
    first = [data.train[i] for i in range(4)]
    if data.augment:
        first = [data.augment(sample, np.random.default_rng(0)) for sample in first]
    batch: Batch = data.collate(first)
    return len(data.train), batch


# The records


def test_the_flag_has_the_names_of_the_records() -> None:
    assert value_kind(field_types(TrainingFlags)["task"])[1] == tuple(TASKS)
    assert all(name == facts.name for name, facts in TASKS.items())


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
    config = transformers.CONFIG_MAPPING[ARCHITECTURES.get(name, "bert")]
    kind = getattr(transformers, auto_class)._model_mapping[config]
    assert kind.__name__.endswith(TASKS[name].model_classes)


@pytest.mark.parametrize(
    ("name", "flags"), [*((name, {}) for name in ROW_OF), ("preference", {"preference_loss": "kto"})]
)
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


@pytest.mark.parametrize("name", ROW_OF)
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


@pytest.mark.parametrize("name", [name for name in ROW_OF if TASKS[name].is_streamed])
def test_tasks_that_can_read_row_by_row_do(name: str, task_of: Callable[..., Task]) -> None:
    assert isinstance(task_of(name, streaming=True).build_data().train, StreamedSamples)


@pytest.mark.parametrize("name", ROW_OF)
def test_heads_are_for_what_the_record_says(name: str) -> None:
    facts, kind = TASKS[name], load_object(TASKS[name].implementation)
    assert facts.continues_text == (kind.auto_class == "AutoModelForCausalLM")
    words = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
    assert facts.predicts_tokens == (kind.auto_class in words and not facts.compares_answers)


RENDERED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("causal_lm", {"text": "<s>the cat sees"}),
    "completion": ("causal_lm", {"prompt": "<s>the cat", "completion": " sees"}),
    "pair": ("preference", {"prompt": "<s>the cat", "chosen": " sees", "rejected": " eats"}),
    "whole pair": ("preference", {"chosen": "<s>the cat sees", "rejected": "<s>the cat eats"}),
    "reward": ("reward", {"prompt": "<s>the cat", "chosen": " sees", "rejected": " eats"}),
    "class": ("sequence_classification", {"text": "<s>the cat", "label": "x"}),
    "two texts": ("sequence_classification", {"premise": "<s>the cat", "hypothesis": "sees", "label": "x"}),
    "source and target": ("seq2seq_lm", {"source": "<s>the cat", "target": "<s>sees"}),
    "choices": ("multiple_choice", {"context": "<s>the cat", "choices": ["sees", "eats"], "label": 0}),
    "masks": ("masked_lm", {"text": "<s>the cat"}),
}
NOTE = "texts begin or end with special tokens that the tokenizer adds, so it does not add them again"


@pytest.fixture(scope="module")
def tokenizer_folder(gpt_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that begins each text with ``<s>``, as llama's does, and ends it with ``</s>``."""
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    special = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>", "sep": "</s>"}
    tokenizer.add_special_tokens({f"{name}_token": text for name, text in special.items()})
    marks = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=marks
    )
    folder = tmp_path_factory.mktemp("bos")
    tokenizer.save_pretrained(folder)
    return folder


def without_marks(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.replace("<s>", "") if isinstance(value, str) else value for name, value in row.items()}


@pytest.mark.parametrize("kind", RENDERED)
def test_a_begin_token_in_the_text_is_not_added_again(kind: str, load: Load, tokenizer_folder: Path) -> None:
    name, row = RENDERED[kind]
    samples, notes = [], []
    for content in (row, without_marks(row), {**row, "text": "<s>the cat</s>"} if kind == "text" else row):
        rows = [content, content | ({"label": "y"} if row.get("label") == "x" else {})]
        task = load(name, rows, tokenizer_path=str(tokenizer_folder), seq_length=32)
        samples.append(list(task.build_data().train or ()))  # type: ignore[call-overload]
        notes.append(task.notes)
    for rendered, bare in zip(*samples[:2], strict=True):
        assert str(rendered) == str(bare)
    assert (notes[0].count(NOTE), notes[1].count(NOTE)) == (1, 0)
    if kind == "text":
        assert task.tokenizer.decode(samples[2][0]["input_ids"]) == "<s>the cat</s>"


def test_which_tokens_are_added_and_which_remain(tokenizer_folder: Path, bert_folder: Path, gpt_folder: Path) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tokenizer_folder, bert_folder, gpt_folder)]
    names = [tuple(map(tokenizer.convert_ids_to_tokens, added_tokens(tokenizer))) for tokenizer in tokenizers]
    assert names == [(["<s>"], ["</s>"]), (["[CLS]"], ["[SEP]"]), ([], [])]
    added = [1], [2]
    for text, kept in (
        ([1, 2], [1, 2]),
        ([1, 1, 5, 2], [1, 5, 2]),
        ([1, 5, 2, 2], [1, 5, 2]),
        ([1, 5, 5, 2], [1, 5, 5, 2]),
    ):
        assert text[once(text, added)] == kept
    assert [7, 7][once([7, 7], ([7], [7]))] == [7, 7]  # an empty text between two added tokens


def test_an_empty_second_text_keeps_its_separator(load: Load, bert_folder: Path) -> None:
    words_of = AutoTokenizer.from_pretrained(bert_folder)
    pairs = tokenized(words_of, ["the cat"] * 2, ["", "sees"])
    assert [row.tolist() for row in pairs["input_ids"]] == words_of(["the cat"] * 2, ["", "sees"])["input_ids"]


@pytest.mark.parametrize("prompt", ["<s>the cat", "the cat"])
def test_a_prompt_to_continue(prompt: str, load: Load, tokenizer_folder: Path) -> None:
    task = load("causal_lm", tokenizer_path=str(tokenizer_folder), seq_length=32)
    ids = task.inputs(samples_as_part([prompt])).rows[0]["input_ids"]
    assert task.tokenizer.decode(ids) == "<s>the cat"
