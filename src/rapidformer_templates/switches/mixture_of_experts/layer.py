"""A sparse feed-forward: gate, experts, and the way of the tokens to them and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rapidformer_templates.models.adapters import base_of
from rapidformer_templates.switches.mixture_of_experts.experts import Experts
from rapidformer_templates.switches.mixture_of_experts.gate import Gate
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses


class SparseFeedForward(nn.Module):
    """Takes the place of a dense feed-forward: each token visits the experts that its gate chooses.

    Args:
        gate, experts: its parts.
        losses: of the whole model; this layer adds its own to them.
        layer: its number among those of the model, from 0.
        dropout: applied to the output, where the dense one had it.
    """

    def __init__(
        self, gate: Gate, experts: Experts, losses: BalanceLosses, layer: int, dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.dropout = dropout
        self._losses = losses
        self._layer = layer

    @torch.compiler.disable(reason="which tokens an expert gets is known only from the data")
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden] to the same shape; zeros where there is padding."""
        rows = hidden if hidden.ndim == 3 else hidden.unsqueeze(0)
        losses = self._losses
        logits = losses.whole(self.gate(rows))
        mask = losses.mask_of(logits)
        routing = base_of(self.gate).route(logits, mask)  # type: ignore[operator]
        weights = losses.attach(routing.weights, logits, routing.chosen, routing.kept, mask, self._layer)
        weights, chosen = losses.here(weights), losses.here(routing.chosen)
        kept = None if routing.kept is None else losses.here(routing.kept).flatten(0, 1)
        grouped = group_by_expert(rows.flatten(0, 1), chosen.flatten(0, 1), kept, len(self.gate.weight))
        outputs = self.experts(grouped.tokens, grouped.counts, all_taken=kept is None)
        output = ungroup(outputs, grouped, weights.flatten(0, 1)).to(hidden.dtype).view_as(hidden)
        return output if self.dropout is None else self.dropout(output)


@dataclass(frozen=True)
class Grouped:
    """Tokens on their way to the experts. S is tokens × choices.

    Attributes:
        tokens: [S, hidden], those of the first expert first; choices that are not carried out come last.
        counts: [N], tokens of each expert.
        permutation: [S], for each row the choice that stands there.
        back: its inverse.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    permutation: torch.Tensor
    back: torch.Tensor


def group_by_expert(tokens: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor | None, experts: int) -> Grouped:
    """Copy each token to the experts that it visits.

    Args:
        tokens: [R, hidden].
        chosen: [R, K].
        kept: [R, K], False for choices that are not carried out; None if all are.
        experts: N.
    """
    visits = (chosen if kept is None else chosen.where(kept, experts)).flatten()
    permutation = visits.argsort(stable=True)
    back = torch.empty_like(permutation).scatter_(
        0, permutation, torch.arange(len(permutation), device=permutation.device)
    )
    counts = torch.bincount(visits, minlength=experts + 1)[:experts]
    copies: torch.Tensor = Rearrange.apply(tokens, permutation, back, chosen.shape[-1])
    return Grouped(copies, counts, permutation, back)


def ungroup(outputs: torch.Tensor, grouped: Grouped, weights: torch.Tensor) -> torch.Tensor:
    """The sum of the experts' ``outputs`` [S, hidden] of each token by ``weights`` [R, K]: [R, hidden]."""
    returned: torch.Tensor = Rearrange.apply(outputs, grouped.back, grouped.permutation, 1)
    return (returned.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)


class Rearrange(torch.autograd.Function):
    """Copies rows ``copies`` times and puts them into an order.

    Its backward goes the same way back and adds up the copies, in an order that is always the same,
    unlike that of the scattered sums that indexing has for its backward.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, permutation: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        """Row ``i`` of the result is copy ``permutation[i] % copies`` of row ``permutation[i] // copies``.

        Args:
            rows: [R, hidden].
            permutation: [R · copies].
            back: its inverse.
        """
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, permutation if copies == 1 else permutation // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        gradient = gradients[0].index_select(0, back)
        return gradient if ctx.copies == 1 else gradient.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None
