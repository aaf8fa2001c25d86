"""Weighted mixtures of data sets: exact shares, complete epochs of each set, and sets that cannot be mixed."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.tasks import TASKS
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import WORDS, Load, write_jsonl


@pytest.fixture
def load(load: Load) -> Load:
    return partial(load, seq_length=32, seed=3)


@pytest.fixture
def sets(tmp_path: Path) -> None:
    """Write sets of 7 and 20 rows. The first word of each text shows which set it is from."""
    draw = np.random.default_rng(0)
    for name, word, count in (("a", "river", 7), ("b", "tree", 20)):
        rows = [{"text": f"{word} {' '.join(draw.choice(WORDS, 5))} {i}", "label": "xy"[i % 2]} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    write_jsonl(tmp_path / "a-valid.jsonl", rows[:3])


def texts(task: Any, samples: Any, count: int) -> list[str]:
    return [task.tokenizer.decode(samples[p]["input_ids"], skip_special_tokens=True) for p in range(count)]


def test_each_set_has_its_share_at_any_time(load: Load, sets: None) -> None:
    task = load("causal_lm", data_name="0.7 a 0.3 b")
    task.check()
    data: Any = task.build_data()
    assert len(data.train) == 27
    found = texts(task, data.train, 210)
    of_a = np.cumsum([text.startswith("river") for text in found])
    assert (np.abs(of_a - 0.7 * np.arange(1, 211)) < 1).all()
    from_a, from_b = ([t for t in found if t.startswith(word)] for word in ("river", "tree"))
    for epoch in range(20):  # each epoch of a set is complete and has a separate order
        assert len(set(from_a[epoch * 7 : epoch * 7 + 7])) == 7
    assert from_a[:7] != from_a[7:14]
    assert max(Counter(from_b[:60]).values()) == 3
    items = [item["input_ids"].tolist() for item in data.train.__getitems__([200, 3])]
    assert [data.train[p]["input_ids"].tolist() for p in (200, 3)] == items
    assert len(data.valid) == 3


def test_packed_rows_are_counted_as_their_samples(load: Load, sets: None) -> None:
    task = load("causal_lm", data_name="0.5 a 0.5 b", pack_sequences=True)
    samples: Any = task.build_data().train
    end = task.tokenizer.eos_token_id
    for positions in ([0, 1, 2], [5, 40]):
        rows = samples.__getitems__(positions)
        documents = sum(int((row["input_ids"] == end).sum()) for row in rows)
        assert sum(row.samples for row in rows) == documents


def test_labels_of_a_classifier(load: Load, sets: None, tmp_path: Path, says: Says) -> None:
    task = load("sequence_classification", data_name="1 a 2 b")
    task.build_data()
    assert task.labels == ["x", "y"]
    write_jsonl(tmp_path / "c.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "z"}])
    with says(DataError):
        load("sequence_classification", data_name="1 a 1 c").build_data()


def test_what_does_not_mix(load: Load, sets: None, tmp_path: Path, says: Says) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "a", "completion": "b c"}] * 3)
    for name in ("1 a 1 chat", "0.7 a 0.3", "0.7 a 0.3 a", "0.7 a 0.3 no-such", "0 a 1 b"):
        with says(DataError):
            load("causal_lm", data_name=name).build_data()
    assert load("causal_lm", data_name="1 a 1 chat", loss_on="all").build_data().train


PAIR = {"prompt": "the cat", "chosen": " sees a tree", "rejected": " eats the house"}
TAGS = {"tokens": ["the", "cat"], "ner_tags": ["O", "B-X"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence_classification": ("", {"text": "a cat", "label": "x"}),
    "regression": ("sequence_classification", {"text": "a cat", "label": 0.5}),
    "several labels": ("sequence_classification", {"text": "a cat", "label": ["x", "y"]}),
    "token_classification": ("", TAGS),
    "multiple_choice": ("", {"context": "the cat", "choices": ["sees a tree", "eats"], "label": 1}),
    "masked_lm": ("", {"text": "the cat sees a tree"}),
    "causal_lm": ("", {"text": "the cat sees a tree"}),
    "seq2seq_lm": ("", {"source": "the cat", "target": "sees a tree"}),
    "preference": ("", PAIR),
    "judged": ("preference", PAIR),
    "reward": ("", PAIR),
}
"""A row for each kind of data, after the task if its name differs from the kind."""


def test_every_task_of_one_row_a_sample_is_listed() -> None:
    named = {task or kind for kind, (task, _) in KINDS.items()}
    assert named == TASKS.keys() - {"pretraining", "question_answering"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_a_set_with_itself_is_the_set(kind: str, load: Load, tmp_path: Path) -> None:
    """Head, metric and batches are the same, no matter what the task has learned from its data."""
    task, row = KINDS[kind]
    other = {"label": "y"} if row.get("label") == "x" else {}
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [row, row | other] * 2)
    flags = {"preference_loss": "kto"} if kind == "judged" else {}
    one, mixture = (load(task or kind, data_name=name, **flags) for name in ("a", "0.5 a 0.5 b"))
    found, wanted = mixture.build_data(), one.build_data()  # type: Any, Any
    assert mixture.config_overrides() == one.config_overrides()
    assert mixture.best_metric == one.best_metric
    assert mixture.build_model().config.to_dict() == one.build_model().config.to_dict()
    samples = [found.train[position] for position in range(4)]
    assert samples[0].keys() == wanted.train[0].keys()
    if found.augment is None:
        batch = found.collate(samples)
        assert batch.keys() == wanted.collate([wanted.train[position] for position in range(4)]).keys()
