"""Preference losses by the formulas of their papers, written differently and in fp64, and their derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from rapidformer_templates.data.tasks import preference as losses
from rapidformer_templates.data.tasks.preference import Answers

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
