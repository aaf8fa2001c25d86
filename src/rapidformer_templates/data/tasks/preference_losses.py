"""Preference losses from log-probabilities of whole answers. They are pure functions of tensors.

Each loss follows its paper. All are tested against TRL. They also follow TRL where a paper leaves a choice open
(lengths in IPO, the tokens of the likelihood in ORPO).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from rapidformer_templates.data.collate import IGNORED, shifted_left


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of answers. Each tensor has shape (answers,).

    Attributes:
        logps: sums over the tokens of each answer.
        lengths: number of tokens of each answer.
        reference: the same sums from the reference model. Zeros if the loss needs no reference.
        whole_nll: negative log-likelihood summed over all tokens, including the prompt.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor
    whole_nll: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability per token."""
        return self.logps / self.lengths

    @property
    def ratios(self) -> torch.Tensor:
        """Log-ratio of the probabilities under the model and under the reference."""
        return self.logps - self.reference

    def halves(self) -> tuple[Answers, Answers]:
        """Split a batch of pairs into chosen and rejected answers."""
        parts = [tensor.chunk(2) for tensor in (self.logps, self.lengths, self.reference, self.whole_nll)]
        return Answers(*(chosen for chosen, _ in parts)), Answers(*(rejected for _, rejected in parts))


def answers_of(logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Answers:
    """Compute the log-probability of the labelled tokens in each row. ``reference`` is zeros.

    Args:
        logits: (rows, tokens, words). They may be sharded over workers.
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
    """Azar et al., 2023, equation 17, with log-probabilities per token. ``beta`` is their tau."""
    margin = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
    return (margin - 1 / (2 * beta)) ** 2


def simpo(chosen: Answers, rejected: Answers, beta: float, gamma: float) -> torch.Tensor:
    """Meng et al., 2024, equation 6."""
    return -logsigmoid(beta * (chosen.means - rejected.means) - gamma)


def odds_ratio(chosen: Answers, rejected: Answers) -> torch.Tensor:
    """Hong et al., 2024, equation 7: the second term of the ORPO loss, before its weight."""
    return -logsigmoid(_log_odds(chosen.means) - _log_odds(rejected.means))


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    """Compute log(p / (1 - p)) from log p, exact for p near 0 and near 1."""
    means = means.clamp(max=-torch.finfo(means.dtype).tiny)
    near_one = means > -0.6931472
    small = torch.where(near_one, torch.full_like(means, -1.0), means)  # both branches need a finite derivative
    large = torch.where(near_one, means, torch.full_like(means, -0.5))
    return means - torch.where(near_one, torch.log(-torch.expm1(large)), torch.log1p(-torch.exp(small)))


def kto(
    answers: Answers, is_good: torch.Tensor, beta: float, drift: float, weights: tuple[float, float]
) -> torch.Tensor:
    """Ethayarajh et al., 2024, equation 8.

    Args:
        is_good: (answers,).
        drift: mean log-ratio of answers to other prompts over the global batch, at least 0.
        weights: weights of good and of bad answers.
    """
    sign = torch.where(is_good, 1.0, -1.0)
    weight = torch.where(is_good, *weights)
    return weight * (1 - torch.sigmoid(sign * (beta * (answers.ratios - drift))))


def reward(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the choice (Bradley and Terry) for rewards of shape (pairs,)."""
    return -logsigmoid(chosen - rejected)
