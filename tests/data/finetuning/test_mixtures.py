"""Weighted mixtures of data sets: exact shares, complete epochs of each set, and sets that cannot be mixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.tasks import TASKS, load_task
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import TINY, WORDS, write_jsonl

Configure = Callable[..., RunConfig]
FLAGS = {"model_type": "gpt2", "seq_length": 32, "validation_fraction": 0.0, "seed": 3}


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Write sets of 7 and 20 rows. The first word of each text shows which set it is from."""
    draw = np.random.default_rng(0)
    for name, word, count in (("a", "river", 7), ("b", "tree", 20)):
        rows = [{"text": f"{word} {' '.join(draw.choice(WORDS, 5))} {i}", "label": "xy"[i % 2]} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    write_jsonl(tmp_path / "a-valid.jsonl", rows[:3])
    return tmp_path


def texts(task: Any, samples: Any, count: int) -> list[str]:
    return [task.tokenizer.decode(samples[p]["input_ids"], skip_special_tokens=True) for p in range(count)]


def test_each_set_has_its_share_at_any_time(configure: Configure, gpt_folder: Path, sets: Path) -> None:
    config = configure(
        **TINY, **FLAGS, task="causal_lm", data_dir=str(sets), data_name="0.7 a 0.3 b", tokenizer_path=str(gpt_folder)
    )
    task = load_task(config)
    task.check()
    data = task.build_data()
    assert data.train is not None
    assert len(data.train) == 27  # type: ignore[arg-type]
    found = texts(task, data.train, 210)
    of_a = np.cumsum([text.startswith("river") for text in found])
    assert (np.abs(of_a - 0.7 * np.arange(1, 211)) < 1).all()
    from_a, from_b = ([t for t in found if t.startswith(word)] for word in ("river", "tree"))
    for epoch in range(20):  # each epoch of a set is complete and has a separate order
        assert len(set(from_a[epoch * 7 : epoch * 7 + 7])) == 7
    assert from_a[:7] != from_a[7:14]
    assert max(Counter(from_b[:60]).values()) == 3
    assert [data.train[p]["input_ids"].tolist() for p in (200, 3)] == [
        item["input_ids"].tolist() for item in data.train.__getitems__([200, 3])  # type: ignore[union-attr]
    ]  # fmt: skip
    assert len(data.valid or []) == 3


def test_packed_rows_are_counted_as_their_samples(configure: Configure, gpt_folder: Path, sets: Path) -> None:
    flags = {**TINY, **FLAGS, "task": "causal_lm", "data_dir": str(sets), "tokenizer_path": str(gpt_folder)}
    task = load_task(configure(**flags, data_name="0.5 a 0.5 b", pack_sequences=True))
    samples: Any = task.build_data().train
    end = task.tokenizer.eos_token_id
    for positions in ([0, 1, 2], [5, 40]):
        rows = samples.__getitems__(positions)
        documents = sum(int((row["input_ids"] == end).sum()) for row in rows)
        assert samples.size_of(positions) == (documents, sum(len(row["input_ids"]) for row in rows))


def test_labels_of_a_classifier(configure: Configure, bert_folder: Path, sets: Path) -> None:
    flags = {**TINY, **FLAGS, "model_type": "bert", "data_dir": str(sets), "tokenizer_path": str(bert_folder)}
    task = load_task(configure(**flags, task="sequence_classification", data_name="1 a 2 b"))
    task.build_data()
    assert task.labels == ["x", "y"]
    write_jsonl(sets / "c.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "z"}])
    with pytest.raises(DataError, match="different labels \\(a: x, y; c: x, z\\)"):
        load_task(configure(**flags, task="sequence_classification", data_name="1 a 1 c")).build_data()


def test_what_does_not_mix(configure: Configure, gpt_folder: Path, sets: Path) -> None:
    flags = {**TINY, **FLAGS, "task": "causal_lm", "data_dir": str(sets), "tokenizer_path": str(gpt_folder)}
    write_jsonl(sets / "chat.jsonl", [{"prompt": "a", "completion": "b c"}] * 3)
    with pytest.raises(DataError, match="samples of different kinds"):
        load_task(configure(**flags, data_name="1 a 1 chat")).build_data()
    assert load_task(configure(**flags, data_name="1 a 1 chat", loss_on="all")).build_data().train
    for name, message in (
        ("0.7 a 0.3", "weights and corpora do not alternate"),
        ("0.7 a 0.3 a", "a data set is named twice"),
        ("0.7 a 0.3 no-such", "there is no data set 'no-such'"),
    ):
        with pytest.raises(DataError, match=message):
            load_task(configure(**flags, data_name=name)).check()
    with pytest.raises(DataError, match="these are not weights: 0, 1") as caught:
        load_task(configure(**flags, data_name="0 a 1 b")).check()
    assert caught.value.where == "--data-name"


PAIR = {"prompt": "the cat", "chosen": " sees a tree", "rejected": " eats the house"}
TAGS = {"tokens": ["the", "cat"], "ner_tags": ["O", "B-X"]}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sequence_classification": ("bert", "", {"text": "a cat", "label": "x"}),
    "regression": ("bert", "sequence_classification", {"text": "a cat", "label": 0.5}),
    "several labels": ("bert", "sequence_classification", {"text": "a cat", "label": ["x", "y"]}),
    "token_classification": ("bert", "", TAGS),
    "multiple_choice": ("bert", "", {"context": "the cat", "choices": ["sees a tree", "eats"], "label": 1}),
    "masked_lm": ("bert", "", {"text": "the cat sees a tree"}),
    "causal_lm": ("gpt2", "", {"text": "the cat sees a tree"}),
    "seq2seq_lm": ("t5", "", {"source": "the cat", "target": "sees a tree"}),
    "preference": ("gpt2", "", PAIR),
    "judged": ("gpt2", "preference", PAIR),
    "reward": ("gpt2", "", PAIR),
}
"""A row for each kind of data: the architecture, the task if its name differs from the kind, and the contents."""


def test_every_task_of_one_row_a_sample_is_listed() -> None:
    assert {task or kind for kind, (_, task, _) in KINDS.items()} == TASKS.keys() - {
        "pretraining",
        "question_answering",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_a_set_with_itself_is_the_set(
    kind: str, configure: Configure, gpt_folder: Path, bert_folder: Path, tmp_path: Path
) -> None:
    """Head, metric and batches are the same, no matter what the task has learned from its data."""
    architecture, task, row = KINDS[kind]
    other = {"label": "y"} if row.get("label") == "x" else {}
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [row, row | other] * 2)
    tokenizer = bert_folder if architecture == "bert" else gpt_folder
    flags = {**TINY, **FLAGS, "model_type": architecture, "data_dir": str(tmp_path), "tokenizer_path": str(tokenizer)}
    if kind == "judged":
        flags["preference_loss"] = "kto"
    one, mixture = (load_task(configure(**flags, task=task or kind, data_name=name)) for name in ("a", "0.5 a 0.5 b"))
    found, wanted = mixture.build_data(), one.build_data()
    assert mixture.config_overrides() == one.config_overrides()
    assert mixture.best_metric == one.best_metric
    assert mixture.build_model().config.to_dict() == one.build_model().config.to_dict()
    assert found.train is not None
    assert wanted.train is not None
    samples = [found.train[position] for position in range(4)]
    assert samples[0].keys() == wanted.train[0].keys()
    assert found.collate is not None
    if found.augment is None:
        batch = found.collate(samples)
        assert batch.keys() == wanted.collate([wanted.train[position] for position in range(4)]).keys()
