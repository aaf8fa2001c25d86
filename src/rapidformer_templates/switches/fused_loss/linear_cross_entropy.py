"""Linear layer and cross-entropy, a chunk of rows at a time, with torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from rapidformer_templates.switches.fused_loss.memory import rows_at_once
from rapidformer_templates.switches.fused_loss.pointwise import Pointwise


@dataclass(frozen=True)
class Recipe:
    """How the loss follows from the product.

    Attributes:
        pointwise: what is done to each logit, in this order.
        ignored: target of rows that do not count.
        smoothing: label smoothing, as in ``torch.nn.functional.cross_entropy``.
    """

    pointwise: tuple[Pointwise, ...] = ()
    ignored: int = -100
    smoothing: float = 0.0


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """The sum of the cross-entropies of ``hidden @ weight.T + bias`` over the rows that count.

    At most a quarter of the rows has its logits in memory at a time: they give the loss and, in the
    same pass, its gradient, which the backward has only to scale. Gradients of weight and bias are summed in fp32.

    Args:
        hidden: (rows, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary,) or None.
        target: (rows,), the index of a word or ``recipe.ignored``.

    Returns:
        A scalar, in the type in which the loss would be computed from whole logits.
    """
    total: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, target, recipe)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        recipe: Recipe,
    ) -> torch.Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        loss_type = torch.float32 if autocast else None
        # Autocast would keep the weight that it casts here, where no gradient is recorded, for others to find.
        with torch.autocast(device, enabled=False):
            sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
            weight, bias = weight.to(compute), None if bias is None else bias.to(compute)
            losses = []
            step = rows_at_once(len(target), len(weight), device)
            for rows in _chunks(target, recipe.ignored, step):
                part = hidden[rows].to(compute)
                loss, slope = _loss_and_slope(F.linear(part, weight, bias), target[rows], recipe, loss_type)
                losses.append(loss)
                sums.add(slope.to(compute), rows, part, weight)
        ctx.save_for_backward(*sums.finished())
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: autograd itself refuses a second backward through tensors that were changed.
        return (*(None if g is None else g.mul_(outer[0]) for g in ctx.saved_tensors), None, None)


def _chunks(target: torch.Tensor, ignored: int, step: int) -> Iterator[Any]:
    """Indices of rows, ``step`` at a time. Those that do not count are left out where it costs no waiting."""
    if target.is_cpu:
        yield from (target != ignored).nonzero().flatten().split(step)
    else:
        yield from (slice(begin, begin + step) for begin in range(0, len(target), step))


def _loss_and_slope(
    logits: torch.Tensor, target: torch.Tensor, recipe: Recipe, loss_type: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses of a chunk, its gradient by the logits)."""
    values = [logits]
    for function in recipe.pointwise:
        values.append(function(values[-1]))
    log_shares = torch.log_softmax(values[-1], dim=-1, dtype=loss_type)
    counts = target != recipe.ignored
    index = torch.where(counts, target, 0)[:, None]
    losses = -log_shares.gather(1, index).squeeze(1)
    if recipe.smoothing:
        losses = (1 - recipe.smoothing) * losses - recipe.smoothing * log_shares.mean(dim=-1)
    slope = log_shares.exp_()
    if recipe.smoothing:
        slope.sub_(recipe.smoothing / slope.shape[1])
    slope.scatter_add_(1, index, slope.new_full((1, 1), recipe.smoothing - 1).expand_as(index))
    slope.mul_(counts[:, None])
    for function, value in zip(reversed(recipe.pointwise), reversed(values[1:]), strict=True):
        slope = function.slope(slope, value)
    return torch.where(counts, losses, 0).sum(), slope


class _Gradients:
    """The gradients by hidden states, weight and bias, as far as they are wanted, summed over the chunks."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self.types = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None

    def add(self, slope: torch.Tensor, rows: Any, part: torch.Tensor, weight: torch.Tensor) -> None:
        """What a chunk adds: ``slope`` (rows, vocabulary) is the gradient by its logits, ``part`` its input."""
        if self.hidden is not None:
            self.hidden[rows] = (slope @ weight).to(self.hidden.dtype)
        if self.weight is not None and self.weight.dtype == slope.dtype:
            self.weight.addmm_(slope.T, part)
        elif self.weight is not None:
            self.weight += slope.T @ part
        if self.bias is not None:
            self.bias += slope.sum(dim=0)

    def finished(self) -> list[torch.Tensor | None]:
        """In the types of what they are gradients of."""
        sums = (self.hidden, self.weight, self.bias)
        return [None if g is None else g.to(dtype) for g, dtype in zip(sums, self.types, strict=True)]
