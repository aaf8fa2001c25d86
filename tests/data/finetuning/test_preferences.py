"""Preference rows in their usual forms, as tokens and labels, and the errors for rows that cannot be used."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from rapidformer_templates.data.tasks import Task
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import Load


@pytest.fixture
def load(load: Load) -> Load:
    return partial(load, "preference")


def samples_of(task: Task) -> list[dict[str, Any]]:
    return list(task.build_data().train or ())  # type: ignore[call-overload]


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
    (sample,) = samples_of(task)
    assert learned(task, sample) == ("hello world it runs<|endoftext|>", " it runs<|endoftext|>")
    assert learned(task, sample, "rejected_") == ("hello world it sleeps<|endoftext|>", " it sleeps<|endoftext|>")
    task = load([{"chosen": "hello world it runs", "rejected": "hello world it sleeps"}])  # they share a prompt
    assert learned(task, samples_of(task)[0])[1].strip() == "runs<|endoftext|>"


def test_conversations_with_their_prompt_or_without_are_the_same(load: Load) -> None:
    task = load([LISTS])
    for row in (LISTS, WHOLE, WHOLE | {"prompt": "hello"}):
        (sample,) = samples_of(load([row]))
        text, learns = learned(task, sample)
        assert text.endswith("user:\nhello\n\nassistant:\nit runs<|endoftext|>")
        assert learns == "it runs<|endoftext|>"
        assert learned(task, sample, "rejected_")[1] == "it sleeps<|endoftext|>"


def test_judged_answers_are_paired_with_the_prompt_before(load: Load) -> None:
    rows = [{"prompt": f"say {n}", "completion": f" {n} and {n}", "label": n != "cat"} for n in ("dog", "cat", "tree")]
    task: Any = load(rows, preference_loss="kto")
    samples = samples_of(task)
    assert [sample["is_good"] for sample in samples] == [True, False, True]
    assert learned(task, samples[0], "kl_") == ("say dog tree and tree<|endoftext|>", " tree and tree<|endoftext|>")
    batch = task.build_data().collate(samples)
    assert task.count_targets(batch, shifted=True) == 3
    assert {"input_ids", "labels", "kl_input_ids", "kl_labels", "is_good", "counted"} < batch.keys()


def test_labels_of_csv_files_are_texts(load: Load, says: Says) -> None:
    labels = ["true", "False", "1", "0", " TRUE "]
    rows = [{"prompt": f"say {label}", "completion": " cat", "label": label} for label in labels]
    train = samples_of(load(rows, preference_loss="kto"))
    assert [sample["is_good"] for sample in train] == [True, False, True, False, True]
    for label in ("yes", "", "2", 2):
        with says(DataError):
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
    told = [learned(task, sample, "kl_") for sample in samples_of(task)]
    partners = ["house", "house", "cat", "cat", "house"]
    assert [next(word for word in words if word in text) for _, text in told] == partners
    assert all(f"say {prompt}" in text for prompt, (text, _) in zip("aabba", told, strict=True))
    assert not any("drift" in note for note in task.notes)


def test_answers_to_one_prompt_alone_are_noted(load: Load, says: Says) -> None:
    rows = [{"prompt": "say", "completion": f" {word}", "label": True} for word in ("dog", "cat")]
    task = load(rows, preference_loss="kto")
    assert learned(task, samples_of(task)[0], "kl_")[1] == " cat<|endoftext|>"
    says.text("\n".join(task.notes))


def test_rewards_of_answers_that_are_not_there_are_no_numbers(load: Load) -> None:
    task = load([{"prompt": "say", "completion": " dog", "label": True}], preference_loss="kto")
    metrics = task.compute_metrics([(0.5, True), (1.5, True)], [None, None])
    assert metrics["rewards/chosen"] == 1.0
    assert math.isnan(metrics["rewards/rejected"])
    assert math.isnan(metrics["rewards/margins"])


def test_pairs_are_split_for_kto(load: Load) -> None:
    task = load([TEXT, {"prompt": "say", "chosen": " good", "rejected": " bad"}], preference_loss="kto")
    samples = samples_of(task)
    assert [sample["is_good"] for sample in samples] == [True, True, False, False]
    assert learned(task, samples[1], "kl_")[0] == "say it runs<|endoftext|>"


BAD: dict[str, dict[str, Any]] = {
    "equal answers": TEXT | {"rejected": " it runs"},
    "an empty answer": TEXT | {"rejected": ""},
    "one answer": {"prompt": "a", "chosen": " b"},
    "other beginnings": WHOLE | {"rejected": [user("bye"), answer("no")]},
    "no room": TEXT,
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_used(load: Load, name: str, says: Says) -> None:
    with says(DataError):
        load([BAD[name]], **({"seq_length": 1} if name == "no room" else {})).build_data()
