"""Windows, answers and scores of question answering, compared with results computed by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.tasks.question_answering import QuestionAnswering, exact_match, f1, normalized
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import WORDS, Load

Make = Callable[..., QuestionAnswering]


def row(seed: int, length: int = 40) -> dict[str, Any]:
    """Build a row: a context of words, with an answer of two words at a random position."""
    generator = np.random.default_rng(seed)
    chosen = [str(word) for word in generator.choice(WORDS, length)]
    at = int(generator.integers(length - 1))
    start = len(" ".join(chosen[:at])) + (at > 0)
    answer = " ".join(chosen[at : at + 2])
    answers = {"text": [answer], "answer_start": [start]}
    return {"question": "what is it", "context": " ".join(chosen), "answers": answers}


@pytest.fixture
def make(load: Load) -> Make:
    def task(rows: list[dict[str, Any]], **flags: Any) -> Any:
        return load("question_answering", rows, rows, **{"seq_length": 24} | flags)

    return task


def perfect(task: QuestionAnswering, batch: dict[str, torch.Tensor]) -> SimpleNamespace:
    """Build the outputs of a model that knows the answers, and is most confident if a window contains all of them."""
    shape = batch["input_ids"].shape
    starts, ends = torch.randn(shape), torch.randn(shape)
    rows = torch.arange(len(starts))
    starts[rows, batch["start_positions"]] = ends[rows, batch["end_positions"]] = 20.0
    return SimpleNamespace(start_logits=starts, end_logits=ends)


def test_the_loss_of_a_batch_is_that_of_its_samples(make: Make) -> None:
    """The reference is transformers' loss of each sample alone, without padding."""
    short = {"question": "what", "context": "it runs", "answers": {"text": ["runs"], "answer_start": [3]}}
    task = make([row(0), short, row(1)], seq_length=64)
    data: Any = task.build_data()
    samples = list(data.train)
    assert len({len(sample["input_ids"]) for sample in samples}) > 1
    model = task.build_model().eval()
    with torch.no_grad():
        together = task.compute_loss(model, data.collate(samples))
        apart = [model(**data.collate([sample])).loss for sample in samples]
    torch.testing.assert_close(together, torch.stack(apart).mean())


def test_windows_cover_the_context_and_hold_the_answers(make: Make) -> None:
    rows = [row(i) for i in range(10)]
    task = make(rows)
    data: Any = task.build_data()
    seen: dict[int, set[int]] = {}
    for i, feature in enumerate(task.features):
        sample, example = data.train[i], task.examples[feature.example]
        assert len(sample["input_ids"]) <= 24
        inside = feature.offsets[feature.offsets[:, 0] >= 0]
        seen.setdefault(feature.example, set()).update(c for a, b in inside for c in range(a, b))
        (answer, start), first, last = example.answers[0], sample["start_positions"], sample["end_positions"]
        whole = inside[0][0] <= start and start + len(answer) <= inside[-1][1]
        if whole:
            text = example.context[feature.offsets[first][0] : feature.offsets[last][1]]
            assert text == answer
        else:
            assert (first, last) == (0, 0)
    for number, characters in seen.items():
        assert characters == {i for i, c in enumerate(task.examples[number].context) if c != " "}


def test_a_model_that_knows_the_answers_is_right(make: Make) -> None:
    task = make([row(i) for i in range(10)])
    data: Any = task.build_data()
    batch = data.collate(list(data.valid))
    torch.manual_seed(0)
    guesses, truths = task.predict(perfect(task, batch), batch)
    assert len(guesses) == len(truths) == len(data.valid)
    assert task.compute_metrics(guesses, truths) == {"exact_match": 100.0, "f1": 100.0}
    # only the first windows: as many examples as they belong to
    few = sum(feature.example < 3 for feature in task.features)
    assert task.compute_metrics(guesses[:few], truths[:few]) == {"exact_match": 100.0, "f1": 100.0}
    zeros = torch.zeros(batch["input_ids"].shape)
    wrong = SimpleNamespace(start_logits=zeros, end_logits=zeros)
    assert task.compute_metrics(*task.predict(wrong, batch))["exact_match"] < 50


def test_short_windows_beside_long_ones(make: Make) -> None:
    """A window with fewer tokens than requested candidates has the same answers as alone, and none in its padding."""
    task = make([row(0, 4), row(1, 18), row(2, 3)])
    data: Any = task.build_data()
    samples = list(data.valid)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert min(lengths) < 20 <= max(lengths)
    batch = data.collate(samples)
    outputs = perfect(task, batch)
    outputs.start_logits[batch["attention_mask"] == 0] = 30.0  # the output at padding must not matter
    together, truths = task.predict(outputs, batch)
    alone = [
        task.predict(
            SimpleNamespace(start_logits=start[None, :length], end_logits=end[None, :length]), data.collate([sample])
        )[0][0]
        for start, end, length, sample in zip(outputs.start_logits, outputs.end_logits, lengths, samples, strict=True)
    ]
    for one, other, length in zip(together, alone, lengths, strict=True):
        assert set(one.starts) | set(one.ends) <= set(range(length))
        assert np.array_equal(one.starts, other.starts)
        assert np.array_equal(one.end_scores, other.end_scores)
    assert task.compute_metrics(together, truths) == task.compute_metrics(alone, truths)
    assert task.compute_metrics(together, truths)["exact_match"] == 100.0


def test_questions_without_an_answer(make: Make) -> None:
    task = make([row(1, 8), row(2, 8) | {"answers": {"text": [], "answer_start": []}}])
    data: Any = task.build_data()
    assert task.may_be_null
    batch = data.collate(list(data.valid))
    torch.manual_seed(0)
    assert task.compute_metrics(*task.predict(perfect(task, batch), batch))["exact_match"] == 100.0


def test_squads_own_file(make: Make, tmp_path: Path, says: Says) -> None:
    rows = [row(i) for i in range(4)]
    flat = make(rows)
    wanted = [sample["start_positions"] for sample in flat.build_data().train or ()]  # type: ignore[attr-defined]
    paragraphs = []
    for r in rows:
        answer = {name: values[0] for name, values in r["answers"].items()}
        questions = [{"id": "x", "question": r["question"], "answers": [answer]}]
        paragraphs.append({"context": r["context"], "qas": questions})
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").unlink()
        document = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    assert [s["start_positions"] for s in load_task(flat.config).build_data().train or ()] == wanted  # type: ignore[attr-defined]
    articles = [{"paragraphs": [{"context": "a cat", "qas": []}]}, {"paragraphs": [{"context": "a dog"}]}]
    (tmp_path / "train.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    with says(DataError):
        load_task(flat.config).build_data()


BAD: dict[str, dict[str, Any]] = {
    "another place": {"answers": {"text": ["zzz"], "answer_start": [1]}},
    "no context": {"context": None},
    "no answers": {"answers": None},
    "a long question": {"question": "what " * 30},
    "another column": {},
}


@pytest.mark.parametrize("name", BAD)
def test_answers_that_cannot_be_used(make: Make, name: str, says: Says) -> None:
    with says(DataError):
        make([row(0), row(0) | BAD[name]], **({} if BAD[name] else {"pair_column": "ask"})).build_data()


def test_a_long_question_of_few_characters(make: Make, gpt_folder: Path, says: Says) -> None:
    """Each character is four tokens of a tokenizer of bytes."""
    flags = {"tokenizer_path": str(gpt_folder), "seq_length": 40}
    with says(DataError):
        make([row(0), row(0) | {"question": "\U0001f600" * 9}], **flags).build_data()


def test_scores_are_squads() -> None:
    assert normalized("The  U.S. Army's a test") == "us armys test"
    assert exact_match("the Eiffel Tower!", ["eiffel tower", "tower"]) == 1.0
    assert exact_match("Eiffel", ["eiffel tower"]) == 0.0
    # 2 of 3 predicted words are correct and 2 of 2 true words are found: 2 · (2/3) · 1 / (5/3)
    assert f1("big Eiffel Tower", ["the eiffel tower"]) == pytest.approx(0.8)
    assert f1("tower tower", ["tower"]) == pytest.approx(2 / 3)  # repeated words are counted
    assert f1("x", ["y", "x z"]) == pytest.approx(2 / 3)  # the best of the references counts
    assert f1("", []) == exact_match("", []) == 1.0
    assert f1("something", []) == exact_match("something", []) == 0.0
