"""Preference rows in their usual forms, as tokens and labels, and the errors for rows that cannot be used."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, write_jsonl

Load = Callable[..., Task]


@pytest.fixture
def load(tmp_path: Path, configure: Callable[..., RunConfig], gpt_folder: Path) -> Load:
    def make(rows: list[dict[str, Any]], **flags: Any) -> Task:
        write_jsonl(tmp_path / "train.jsonl", rows)
        common = {"data_dir": str(tmp_path), "model_type": "gpt2", "tokenizer_path": str(gpt_folder), **TINY}
        return load_task(configure(**({"task": "preference", "validation_fraction": 0.0} | common | flags)))

    return make


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def learned(task: Task, sample: dict[str, Any], prefix: str = "") -> tuple[str, str]:
    """Return the text of a row, and the part of it that is an answer."""
    ids, labels = sample[f"{prefix}input_ids"], sample[f"{prefix}labels"]
    return task.tokenizer.decode(ids), task.tokenizer.decode([label for label in labels if label != -100])


TEXT = {"prompt": "hello world", "chosen": " it runs", "rejected": " it sleeps"}
LISTS = {"prompt": [user("hello")], "chosen": [answer("it runs")], "rejected": [answer("it sleeps")]}
WHOLE = {"chosen": [user("hello"), answer("it runs")], "rejected": [user("hello"), answer("it sleeps")]}


def test_texts(load: Load) -> None:
    task = load([TEXT])
    (sample,) = [task.build_data().train[0]]  # type: ignore[index]
    assert learned(task, sample) == ("hello world it runs<|endoftext|>", " it runs<|endoftext|>")
    assert learned(task, sample, "rejected_") == ("hello world it sleeps<|endoftext|>", " it sleeps<|endoftext|>")


def test_conversations_with_their_prompt_or_without_are_the_same(load: Load) -> None:
    samples = [load([row]).build_data().train[0] for row in (LISTS, WHOLE, WHOLE | {"prompt": "hello"})]  # type: ignore[index]
    task = load([LISTS])
    wanted = "user:\nhello\n\nassistant:\nit runs<|endoftext|>"
    for sample in samples:
        text, learns = learned(task, sample)
        assert text.endswith(wanted)
        assert learns == "it runs<|endoftext|>"
        assert learned(task, sample, "rejected_")[1] == "it sleeps<|endoftext|>"


def test_texts_without_a_prompt_have_what_they_share(load: Load) -> None:
    task = load([{"chosen": "hello world it runs", "rejected": "hello world it sleeps"}])
    sample = task.build_data().train[0]  # type: ignore[index]
    assert learned(task, sample)[1] == " runs<|endoftext|>" or learned(task, sample)[1] == "runs<|endoftext|>"


def test_judged_answers_are_paired_with_the_prompt_before(load: Load) -> None:
    rows = [{"prompt": f"say {n}", "completion": f" {n} and {n}", "label": n != "cat"} for n in ("dog", "cat", "tree")]
    task = load(rows, preference_loss="kto")
    data = task.build_data()
    samples = [data.train[i] for i in range(3)]  # type: ignore[index]
    assert [sample["is_good"] for sample in samples] == [True, False, True]
    assert learned(task, samples[0], "kl_") == ("say dog tree and tree<|endoftext|>", " tree and tree<|endoftext|>")
    assert data.collate is not None
    batch = data.collate(samples)
    assert task.count_targets(batch, shifted=True) == 3
    assert {"input_ids", "labels", "kl_input_ids", "kl_labels", "is_good", "counted"} < batch.keys()


def test_labels_of_csv_files_are_texts(load: Load) -> None:
    labels = ["true", "False", "1", "0", " TRUE "]
    rows = [{"prompt": f"say {label}", "completion": " cat", "label": label} for label in labels]
    train = load(rows, preference_loss="kto").build_data().train
    assert [train[i]["is_good"] for i in range(5)] == [True, False, True, False, True]  # type: ignore[index]
    for label in ("yes", "", "2"):
        with pytest.raises(DataError, match=f"the label is '{label}'"):
            load([{**rows[0], "label": label}], preference_loss="kto").build_data()


@pytest.mark.parametrize("is_chat", [False, True])
def test_drift_is_measured_with_the_answer_to_another_prompt(is_chat: bool, load: Load) -> None:
    """Several answers to one prompt follow each other, as usual."""

    def row(prompt: str, word: str) -> dict[str, Any]:
        if is_chat:
            return {"prompt": [user(f"say {prompt}")], "completion": [answer(word)], "label": True}
        return {"prompt": f"say {prompt}", "completion": f" {word}", "label": True}

    words = ["dog", "cat", "tree", "house", "river"]
    task = load([row(prompt, word) for prompt, word in zip("aabba", words, strict=True)], preference_loss="kto")
    train = task.build_data().train
    told = [learned(task, train[i], "kl_") for i in range(5)]  # type: ignore[index]
    partners = ["house", "house", "cat", "cat", "house"]
    assert [next(word for word in words if word in text) for _, text in told] == partners
    assert all(f"say {prompt}" in text for prompt, (text, _) in zip("aabba", told, strict=True))
    assert not any("drift" in note for note in task.notes)


def test_answers_to_one_prompt_alone_are_noted(load: Load) -> None:
    rows = [{"prompt": "say", "completion": f" {word}", "label": True} for word in ("dog", "cat")]
    task = load(rows, preference_loss="kto")
    train = task.build_data().train
    assert learned(task, train[0], "kl_")[1] == " cat<|endoftext|>"  # type: ignore[index]
    assert task.notes == ["train: all answers are to one prompt, so KTO measures drift on other answers to it"]


def test_rewards_of_answers_that_are_not_there_are_no_numbers(load: Load) -> None:
    task = load([{"prompt": "say", "completion": " dog", "label": True}], preference_loss="kto")
    metrics = task.compute_metrics([(0.5, True), (1.5, True)], [None, None])
    assert metrics["rewards/chosen"] == 1.0
    assert math.isnan(metrics["rewards/rejected"])
    assert math.isnan(metrics["rewards/margins"])


def test_pairs_are_split_for_kto(load: Load) -> None:
    rows = [TEXT, {"prompt": "say", "chosen": " good", "rejected": " bad"}]
    task = load(rows, preference_loss="kto")
    samples = [task.build_data().train[i] for i in range(4)]  # type: ignore[index]
    assert [sample["is_good"] for sample in samples] == [True, True, False, False]
    assert learned(task, samples[1], "kl_")[0] == "say it runs<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        (TEXT | {"rejected": " it runs"}, {}, "the chosen and the rejected answer are the same"),
        (TEXT | {"rejected": ""}, {}, "the completion is empty"),
        ({"prompt": "a", "chosen": " b"}, {}, "there is no column 'rejected'"),
        (WHOLE | {"rejected": [user("bye"), answer("no")]}, {}, "do not begin with the same message"),
        ({"prompt": "a", "completion": " b", "label": 2}, {"preference_loss": "kto"}, "the label is 2"),
        (TEXT, {"seq_length": 1}, "no token of an answer is within the first 1 tokens"),
    ],
)
def test_rows_that_cannot_be_used(load: Load, row: dict[str, Any], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load([row], **flags).build_data()
