"""A sparse feed-forward: the gate, the experts, and the grouping of tokens by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rapidformer_templates.engines.auxiliary_losses import LossLayer
from rapidformer_templates.models.adapters import base_of
from rapidformer_templates.switches.mixture_of_experts.experts import Experts
from rapidformer_templates.switches.mixture_of_experts.gate import Gate
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses


class SparseFeedForward(LossLayer):
    """Replaces a dense feed-forward. Each token is processed by the experts that its gate chooses.

    Args:
        gate, experts: its parts.
        losses: the losses of the whole model, to which this layer adds its own.
        layer: index of this layer among the model's sparse layers, from 0.
        dropout: applied to the output, if the dense feed-forward had dropout there.
    """

    losses: BalanceLosses

    def __init__(
        self, gate: Gate, experts: Experts, losses: BalanceLosses, layer: int, dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.dropout = dropout
        self.losses = losses
        self._layer = layer

    @torch.compiler.disable(reason="which tokens an expert gets is known only from the data")
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [B, T, hidden] to the same shape. Padding gives zeros."""
        rows = hidden if hidden.ndim == 3 else hidden.unsqueeze(0)
        losses = self.losses
        logits = losses.gather(self.gate(rows))
        mask = losses.mask_of(logits)
        routing = base_of(self.gate).route(logits, mask)  # type: ignore[operator]
        weights = losses.attach(routing.weights, logits, routing.chosen, routing.is_kept, mask, self._layer)
        weights, chosen = losses.local_part_of(weights), losses.local_part_of(routing.chosen)
        is_kept = None if routing.is_kept is None else losses.local_part_of(routing.is_kept).flatten(0, 1)
        grouped = group_by_expert(rows.flatten(0, 1), chosen.flatten(0, 1), is_kept, len(self.gate.weight))
        outputs = self.experts(grouped.tokens, grouped.counts, all_routed=is_kept is None)
        output = ungroup(outputs, grouped, weights.flatten(0, 1)).to(hidden.dtype).view_as(hidden)
        return output if self.dropout is None else self.dropout(output)


@dataclass(frozen=True)
class Grouped:
    """Tokens sorted by expert. S is tokens × choices.

    Attributes:
        tokens: [S, hidden], sorted by expert. Dropped choices come last.
        counts: [N], number of tokens of each expert.
        permutation: [S], the index of the choice in each row.
        back: the inverse of ``permutation``.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    permutation: torch.Tensor
    back: torch.Tensor


def group_by_expert(tokens: torch.Tensor, chosen: torch.Tensor, is_kept: torch.Tensor | None, experts: int) -> Grouped:
    """Copy each token to the experts that process it.

    Args:
        tokens: [R, hidden].
        chosen: [R, K].
        is_kept: [R, K], False for dropped choices. None if nothing is dropped.
        experts: N.
    """
    visits = (chosen if is_kept is None else chosen.where(is_kept, experts)).flatten()
    permutation = visits.argsort(stable=True)
    back = torch.empty_like(permutation).scatter_(
        0, permutation, torch.arange(len(permutation), device=permutation.device)
    )
    counts = torch.bincount(visits, minlength=experts + 1)[:experts]
    copies: torch.Tensor = Rearrange.apply(tokens, permutation, back, chosen.shape[-1])
    return Grouped(copies, counts, permutation, back)


def ungroup(outputs: torch.Tensor, grouped: Grouped, weights: torch.Tensor) -> torch.Tensor:
    """Sum the experts' ``outputs`` [S, hidden] of each token with ``weights`` [R, K]. Returns [R, hidden]."""
    returned: torch.Tensor = Rearrange.apply(outputs, grouped.back, grouped.permutation, 1)
    return (returned.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)


class _RearrangeContext(FunctionCtx):
    copies: int
    saved_tensors: tuple[torch.Tensor]


class Rearrange(torch.autograd.Function):
    """Copies each row ``copies`` times and reorders the copies.

    The backward reverses this and sums the copies in a fixed order. The scattered sums in the backward of indexing have
    no fixed order.
    """

    @staticmethod
    def forward(
        ctx: _RearrangeContext, rows: torch.Tensor, permutation: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        """Return rows in which row ``i`` is copy ``permutation[i] % copies`` of row ``permutation[i] // copies``.

        Args:
            rows: [R, hidden].
            permutation: [R · copies].
            back: the inverse of ``permutation``.
        """
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, permutation if copies == 1 else permutation // copies)

    @staticmethod
    def backward(ctx: _RearrangeContext, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        gradient = gradients[0].index_select(0, back)
        return gradient if ctx.copies == 1 else gradient.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None
