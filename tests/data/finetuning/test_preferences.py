"""Preferences: rows in their usual forms as tokens and labels, bad rows, and losses by the formulas of their papers."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.tasks import preference as losses
from rapidformer_templates.data.tasks.preference import Answers
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


BETA, GAMMA = 0.3, 0.7


def answers(count: int = 6, seed: int = 0) -> Answers:
    torch.manual_seed(seed)
    lengths = torch.randint(1, 9, (count,)).double()
    logps, reference = (-torch.rand(count, dtype=torch.float64) * 3 * lengths for _ in range(2))
    return Answers(logps.requires_grad_(), lengths, reference, -logps.detach() * 1.5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def wanted(loss: str, p: float, n: float, r: float, q: float, m: float, s: float) -> float:
    """``p, n, r``: log-probability, length and reference of the chosen answer. ``q, m, s``: of the rejected one."""
    if loss == "dpo":
        return -math.log(sigmoid(BETA * math.log((math.exp(p) / math.exp(r)) / (math.exp(q) / math.exp(s)))))
    if loss == "ipo":
        return ((p - r) / n - (q - s) / m - 1 / (2 * BETA)) ** 2
    if loss == "simpo":
        return -math.log(sigmoid(BETA / n * p - BETA / m * q - GAMMA))
    likely, unlikely = math.exp(p / n), math.exp(q / m)
    return -math.log(sigmoid(math.log((likely / (1 - likely)) / (unlikely / (1 - unlikely)))))


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "orpo"])
def test_losses_of_pairs(loss: str) -> None:
    chosen, rejected = answers(seed=1), answers(seed=2)
    found = {
        "dpo": lambda: losses.dpo(chosen, rejected, BETA),
        "ipo": lambda: losses.ipo(chosen, rejected, BETA),
        "simpo": lambda: losses.simpo(chosen, rejected, BETA, GAMMA),
        "orpo": lambda: losses.odds_ratio(chosen, rejected),
    }[loss]()
    rows = zip(
        *(t.tolist() for a in (chosen, rejected) for t in (a.logps.detach(), a.lengths, a.reference)), strict=True
    )
    assert found.tolist() == pytest.approx([wanted(loss, *row) for row in rows], rel=1e-12)


def test_kto_pulls_good_answers_up_and_bad_ones_down() -> None:
    both, good, drift = answers(), torch.tensor([True, False, True, False, True, True]), 0.4
    found = losses.kto(both, good, BETA, drift, (2.0, 0.5))
    z = [BETA * (p - r - drift) for p, r in zip(both.logps.tolist(), both.reference.tolist(), strict=True)]
    each = [2 * (1 - sigmoid(x)) if is_good else 0.5 * (1 - sigmoid(-x)) for x, is_good in zip(z, good, strict=True)]
    assert found.tolist() == pytest.approx(each, rel=1e-12)
    found.sum().backward()
    assert both.logps.grad is not None
    assert ((both.logps.grad < 0) == good).all()


@pytest.mark.parametrize("mean", [-1e-300, -1e-12, -1e-3, -0.6931471, -0.6931473, -5.0, -700.0])
def test_odds_are_finite_and_exact_for_every_probability(mean: float) -> None:
    found = torch.tensor([mean], dtype=torch.float64, requires_grad=True)
    odds = losses._log_odds(found)
    exact = mean - (math.log(-math.expm1(mean)) if mean > -0.7 else math.log1p(-math.exp(mean)))
    assert float(odds.detach()) == pytest.approx(exact, rel=1e-12)
    odds.sum().backward()
    assert found.grad is not None
    assert float(found.grad) == pytest.approx(1 / -math.expm1(mean), rel=1e-9)  # d log(p/(1-p)) / d log p


def test_log_probabilities_are_those_of_the_answers_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    ids, mask = torch.randint(0, 7, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    labels = torch.where(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]).bool(), ids, -100)
    found = losses.answers_of(logits, ids, mask, labels)
    logp = logits.log_softmax(-1)
    each = [[float(logp[row, t - 1, ids[row, t]]) for t in range(1, 5)] for row in range(2)]
    assert found.logps.tolist() == pytest.approx([sum(each[0][1:]), sum(each[1][:2])])
    assert found.lengths.tolist() == [3, 2]
    assert found.whole_nll.tolist() == pytest.approx([-sum(each[0]), -sum(each[1][:2])])
