"""Cross-entropy over a vocabulary, and its gradient. Each worker may have the logits of only some words."""

from __future__ import annotations

import torch
from torch import nn


class VocabularyShard:
    """The vocabulary range of this worker. This class covers the whole vocabulary.

    Attributes:
        count: size of the vocabulary.
        begin: the first word of this worker.
        most: the highest number of words on any worker.
    """

    def __init__(self, count: int) -> None:
        self.count = self.most = count
        self.begin = 0

    def targets_here(self, target: torch.Tensor, counts: torch.Tensor, columns: int) -> torch.Tensor:
        """Return which rows have their target among this worker's ``columns`` words.

        torch itself refuses unknown words.
        """
        return counts

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the workers."""
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the workers."""
        return values


class LossHead(nn.Linear):
    """A last layer that can also compute the loss of rows: ``forward(hidden, target, recipe, words)``.

    Code that divides its weight over workers passes in this worker's words and its part of the weight.
    """


def losses_and_slope(
    logits: torch.Tensor, target: torch.Tensor, words: VocabularyShard, ignored: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of each row, and the gradient of their sum with respect to this worker's logits.

    The computation uses fp32, or fp64 for fp64 logits. Workers exchange three numbers per row (Shoeybi et al., 2019).

    Args:
        logits: (rows, words of this worker).
        target: (rows,), a word of the vocabulary or ``ignored``.
        smoothing: as in ``torch.nn.functional.cross_entropy``.

    Returns:
        Losses of shape (rows,), complete on each worker, and gradients of shape (rows, words of this worker). Both are
            0
        if the target is ``ignored``.
    """
    counts = target != ignored
    is_here = words.targets_here(target, counts, logits.shape[-1])
    column = (target - words.begin).masked_fill(~is_here, 0).unsqueeze(-1)
    kind = torch.promote_types(logits.dtype, torch.float32)
    shifted = logits - words.max(logits.amax(dim=-1).to(kind)).unsqueeze(-1)
    picked = shifted.gather(-1, column).squeeze(-1).masked_fill(~is_here, 0.0)
    logits_sum = shifted.sum(-1) if smoothing else torch.zeros_like(picked)
    shares = shifted.exp_()
    scale, picked, logits_sum = words.sum(torch.stack([shares.sum(-1), picked, logits_sum]))
    losses = scale.log() - (1 - smoothing) * picked - smoothing / words.count * logits_sum
    slope = shares.mul_((counts / scale).unsqueeze(-1))
    if smoothing:
        slope.sub_(smoothing / words.count * counts.to(kind).unsqueeze(-1))
    slope.scatter_add_(-1, column, ((smoothing - 1) * is_here.to(kind)).unsqueeze(-1))
    return losses.masked_fill(~counts, 0.0), slope
