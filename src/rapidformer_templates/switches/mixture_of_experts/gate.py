"""The gate: it chooses the experts of a token and their weights.

Every decision depends only on one sample, a row of the batch. So neither the micro batch size nor the number of workers
changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name


@dataclass(frozen=True)
class Routing:
    """The experts of the tokens of a batch. Shapes: B rows, T tokens each, N experts, K choices.

    Attributes:
        chosen: [B, T, K], experts in the order of their probability.
        weights: [B, T, K], the weight of each chosen expert's output. Zero if the choice is dropped.
        is_kept: [B, T, K], False if the choice is dropped, for padding or a full expert. None if nothing is dropped.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    is_kept: torch.Tensor | None


class Gate(nn.Module):
    """A linear layer over the experts, computed in fp32 also under mixed precision (Fedus et al., 2021).

    Args:
        hidden: size of a token.
        experts: N.
        top_k: number of experts that process a token.
        capacity_factor: see :func:`within_capacity`. None drops nothing.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.top_k = top_k
        self.capacity_factor = capacity_factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, N] of ``rows`` [B, T, hidden]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows.to(wide), self.weight.to(wide))

    def route(self, logits: torch.Tensor, mask: torch.Tensor | None) -> Routing:
        """Return the routing for ``logits`` [B, T, N] of whole samples. ``mask`` [B, T] is False for padding."""
        with torch.autocast(logits.device.type, enabled=False):
            weights, chosen = choose(logits, self.top_k)
        is_kept = None if mask is None else mask.unsqueeze(-1).expand_as(chosen)
        if self.capacity_factor is not None:
            is_kept = within_capacity(chosen, is_kept, logits.shape[-1], self.capacity_factor)
        if is_kept is not None:
            weights = weights * is_kept
        return Routing(chosen, weights, is_kept)


def choose(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, experts) of the ``top_k`` most probable experts, [..., K] each.

    Several weights are normalized to sum to one (Lepikhin et al., 2020; Mixtral). A single weight stays the probability
    itself, through which the gate learns (Fedus et al., 2021).
    """
    weights, chosen = logits.softmax(-1).topk(top_k, -1)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def within_capacity(
    chosen: torch.Tensor, is_kept: torch.Tensor | None, experts: int, capacity_factor: float
) -> torch.Tensor:
    """Return which choices the experts have room for, [B, T, K].

    In a row of T tokens, not counting padding, each expert has room for ``ceil(capacity_factor · K · T / N)`` of them.
    Tokens are taken in their order, the first choice of a token before its second. In an order by probability, a causal
    model would see later tokens.

    Args:
        chosen: [B, T, K].
        is_kept: [B, T, K], False for padding. None without padding.
        experts: N.
        capacity_factor: 1 is just enough for an even load.
    """
    rows, tokens, top_k = chosen.shape
    choices = F.one_hot(chosen.reshape(rows, tokens * top_k), experts)
    if is_kept is None:
        room: int | torch.Tensor = math.ceil(capacity_factor * top_k * tokens / experts)
    else:
        choices = choices * is_kept.reshape(rows, -1, 1)
        real = is_kept[..., 0].sum(1)
        room = torch.ceil(capacity_factor * top_k * real.double() / experts).view(rows, 1)
    before = (choices.cumsum(1) - choices).gather(2, chosen.reshape(rows, -1, 1)).squeeze(2)
    fits = (before < room).view_as(chosen)
    return fits if is_kept is None else fits & is_kept
