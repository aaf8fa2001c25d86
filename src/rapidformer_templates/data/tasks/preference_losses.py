"""Losses of preferences, each of its paper, from log-probabilities of whole answers. Pure functions of tensors.

All are compared with TRL's; where a paper leaves something open (lengths in IPO, the tokens of the likelihood in ORPO),
it is as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from rapidformer_templates.data.targets import IGNORED, shifted_left


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of answers, each of shape (answers,).

    Attributes:
        logps: the sums over their tokens.
        lengths: numbers of those.
        reference: the same sums by the reference model; zeros where the loss needs none.
        whole_nll: the sum of the negative log-likelihood over all tokens, the prompt's included.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor
    whole_nll: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability of a token."""
        return self.logps / self.lengths

    @property
    def ratios(self) -> torch.Tensor:
        """By how much more likely an answer is than by the reference, as a logarithm."""
        return self.logps - self.reference

    def halves(self) -> tuple[Answers, Answers]:
        """The chosen and the rejected ones of a batch of pairs."""
        parts = [tensor.chunk(2) for tensor in (self.logps, self.lengths, self.reference, self.whole_nll)]
        return Answers(*(chosen for chosen, _ in parts)), Answers(*(rejected for _, rejected in parts))


def answers_of(logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Answers:
    """Log-probabilities of the tokens that have a label, row by row; its reference is zeros.

    Args:
        logits: (rows, tokens, words), also such as are divided over workers.
        input_ids, mask, labels: (rows, tokens).
    """
    targets = shifted_left(torch.where(mask.bool(), input_ids, IGNORED))
    nll = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    nll = nll.float().view(targets.shape) if nll.dtype != torch.float64 else nll.view(targets.shape)
    learned = shifted_left(labels) != IGNORED
    logps = -(nll * learned).sum(1)
    return Answers(logps, learned.sum(1), torch.zeros_like(logps), nll.sum(1))


def dpo(chosen: Answers, rejected: Answers, beta: float) -> torch.Tensor:
    """Rafailov et al., 2023, equation 7."""
    return -logsigmoid(beta * (chosen.ratios - rejected.ratios))


def ipo(chosen: Answers, rejected: Answers, beta: float) -> torch.Tensor:
    """Azar et al., 2023, equation 17, of log-probabilities a token; beta is their tau."""
    apart = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
    return (apart - 1 / (2 * beta)) ** 2


def simpo(chosen: Answers, rejected: Answers, beta: float, gamma: float) -> torch.Tensor:
    """Meng et al., 2024, equation 6."""
    return -logsigmoid(beta * (chosen.means - rejected.means) - gamma)


def odds_ratio(chosen: Answers, rejected: Answers) -> torch.Tensor:
    """Hong et al., 2024, equation 7: the second part of ORPO's loss, before its weight."""
    return -logsigmoid(_log_odds(chosen.means) - _log_odds(rejected.means))


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) from log p, exact for p near 0 and near 1."""
    means = means.clamp(max=-torch.finfo(means.dtype).tiny)
    near_one = means > -0.6931472
    small = torch.where(near_one, torch.full_like(means, -1.0), means)  # each branch has a finite derivative
    large = torch.where(near_one, means, torch.full_like(means, -0.5))
    return means - torch.where(near_one, torch.log(-torch.expm1(large)), torch.log1p(-torch.exp(small)))


def kto(
    answers: Answers, is_good: torch.Tensor, beta: float, drift: float, weights: tuple[float, float]
) -> torch.Tensor:
    """Ethayarajh et al., 2024, equation 8.

    Args:
        is_good: (answers,).
        drift: the mean over the global batch of the ratios of answers to other prompts, at least 0.
        weights: of good and of bad answers.
    """
    sign = torch.where(is_good, 1.0, -1.0)
    weight = torch.where(is_good, *weights)
    return weight * (1 - torch.sigmoid(sign * (beta * (answers.ratios - drift))))


def reward(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Bradley and Terry's likelihood of the choice, of rewards (pairs,)."""
    return -logsigmoid(chosen - rejected)
