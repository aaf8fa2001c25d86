"""Weighted mixtures of data sets: exact shares, complete epochs of each set, and sets that cannot be mixed."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import ROW_OF, WORDS, Load, write_jsonl


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


KINDS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    **{task: (task, row_of) for task, row_of in ROW_OF.items() if task != "question_answering"},
    "regression": ("sequence_classification", lambda text: {"text": text, "label": 0.5}),
    "several labels": ("sequence_classification", lambda text: {"text": text, "label": ["x", "y"]}),
    "judged": ("preference", ROW_OF["preference"]),
}
"""The task of each kind of data with one row per sample, and how it gets a row with a text."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_a_set_with_itself_is_the_set(kind: str, load: Load, tmp_path: Path) -> None:
    """Head, metric and batches are the same, no matter what the task has learned from its data."""
    task, row_of = KINDS[kind]
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [row_of("a cat"), row_of("a tree")] * 2)
    flags = {"preference_loss": "kto"} if kind == "judged" else {}
    one, mixture = (load(task, data_name=name, **flags) for name in ("a", "0.5 a 0.5 b"))
    found, wanted = mixture.build_data(), one.build_data()  # type: Any, Any
    assert mixture.config_overrides() == one.config_overrides()
    assert mixture.best_metric == one.best_metric
    assert mixture.build_model().config.to_dict() == one.build_model().config.to_dict()
    samples = [found.train[position] for position in range(4)]
    assert samples[0].keys() == wanted.train[0].keys()
    if found.augment is None:
        batch = found.collate(samples)
        assert batch.keys() == wanted.collate([wanted.train[position] for position in range(4)]).keys()
