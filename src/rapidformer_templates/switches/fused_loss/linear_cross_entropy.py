"""Linear layer and cross-entropy, one chunk of rows at a time, with torch's own operations.

Models may apply functions to each logit before the loss. Their derivatives are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from rapidformer_templates.engines.backwards import in_loss
from rapidformer_templates.models.divided_tensor import VocabularyShard, losses_and_slope

CHUNK_BYTES = {"cpu": 64 * 2**20, "accelerator": 512 * 2**20}
"""Bytes that the fp32 logits of a chunk may take.

The gradient of the head's weight is accumulated once per chunk. An accelerator computes products faster than
that, so its chunks are larger.
"""


def rows_at_once(rows: int, vocabulary: int, device: str) -> int:
    """Return how many of ``rows`` have logits in memory at a time. It is at most a quarter, so never all of them."""
    return max(1, min(CHUNK_BYTES["cpu" if device == "cpu" else "accelerator"] // (4 * vocabulary), -(-rows // 4)))


@dataclass(frozen=True)
class Pointwise:
    """A function of single logits.

    Attributes:
        values: returns the values for a chunk of logits of shape (rows, vocabulary).
        slope: returns the gradient by the inputs, given the gradient by the values and the values.
        dtype: the type that it converts to, if that is what it does.
        constant: what it adds for each word, if that is what it does, of shape (1, vocabulary).
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None
    constant: torch.Tensor | None = None


def cast(dtype: torch.dtype) -> Pointwise:
    """Convert to another number format, like ``logits.float()``. The gradient takes the type of the next product."""
    return Pointwise(lambda x: x.to(dtype), lambda gradient, y: gradient, dtype=dtype)


def scale(factor: float) -> Pointwise:
    """Multiply by a number."""
    return Pointwise(lambda x: x * factor, lambda gradient, y: gradient * factor)


def shift(constant: torch.Tensor) -> Pointwise:
    """Add a constant for each word, of shape (1, vocabulary)."""
    return Pointwise(lambda x: x + constant.to(x.device), lambda gradient, y: gradient, constant=constant)


TANH = Pointwise(torch.tanh, lambda gradient, y: gradient * (1 - y * y))
"""Hyperbolic tangent. Some models use it to cap their logits."""


@dataclass(frozen=True)
class LossRecipe:
    """How the loss is computed from the product.

    Attributes:
        pointwise: functions applied to each logit, in this order.
        ignored: target of rows that do not count.
        smoothing: label smoothing, as in ``torch.nn.functional.cross_entropy``.
    """

    pointwise: tuple[Pointwise, ...] = ()
    ignored: int = -100
    smoothing: float = 0.0

    def loss_and_slope(
        self, logits: torch.Tensor, target: torch.Tensor, words: VocabularyShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of the losses of a chunk, its gradient by the logits)."""
        values = [logits]
        for function in self.pointwise:
            values.append(function.values(values[-1]))
        losses, slope = losses_and_slope(values[-1], target, words, self.ignored, self.smoothing)
        for function, value in zip(reversed(self.pointwise), reversed(values[1:]), strict=True):
            slope = function.slope(slope, value)
        return losses.sum(), slope


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    recipe: LossRecipe,
    words: VocabularyShard | None = None,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of ``hidden @ weight.T + bias`` over the rows that count.

    At most a quarter of the rows have their logits in memory at a time. A single pass over them computes the loss and
    its gradient, which the backward only scales. Gradients of weight and bias are summed in fp32.

    Args:
        hidden: (rows, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary,) or None.
        target: (rows,), the index of a word or ``recipe.ignored``.
        words: part of the vocabulary that ``weight`` and ``bias`` have. None means all of it. Hidden states and targets
            are the same on all workers that share the vocabulary. The gradient of the hidden states is only a part
            of the sum over these workers.

    Returns:
        A scalar, in the type in which the loss would be computed from whole logits.
    """
    words = words or VocabularyShard(len(weight))
    own = slice(words.begin, words.begin + len(weight))
    steps = (step if step.constant is None else shift(step.constant[:, own]) for step in recipe.pointwise)
    recipe = replace(recipe, pointwise=tuple(steps))
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, recipe, words)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        recipe: LossRecipe,
        words: VocabularyShard,
    ) -> torch.Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        # Autocast would cache its cast of the weight here, without a gradient, and other code would find it.
        with torch.autocast(device, enabled=False):
            sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
            weight, bias = weight.to(compute), None if bias is None else bias.to(compute)
            losses = []
            step = rows_at_once(len(target), words.most, device)  # every worker has the same number of chunks
            chunks: Iterable[torch.Tensor | slice] = (slice(i, i + step) for i in range(0, len(target), step))
            if target.is_cpu:  # leave out rows that do not count, if that needs no synchronization
                chunks = (target != recipe.ignored).nonzero().flatten().split(step)
            for rows in chunks:
                part = hidden[rows].to(compute)
                loss, slope = recipe.loss_and_slope(F.linear(part, weight, bias), target[rows], words)
                losses.append(loss)
                sums.add(slope.to(compute), rows, part, weight)
        ctx.save_for_backward(*sums.finished())
        of_logits = [compute, *(step.dtype for step in recipe.pointwise if step.dtype is not None)][-1]
        return torch.stack(losses).sum().to(torch.float32 if autocast else of_logits)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: autograd refuses a second backward through tensors that were changed.
        multiply = torch.mul if in_loss() else torch.Tensor.mul_
        return (*(None if g is None else multiply(g, outer[0]) for g in ctx.saved_tensors), None, None, None)


class _Gradients:
    """Gradients by hidden states, weight and bias, if they are needed, summed over the chunks."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self.types = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, slope: torch.Tensor, rows: torch.Tensor | slice, part: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a chunk. ``slope`` (rows, vocabulary) is the gradient by its logits, ``part`` its input."""
        if self.hidden is not None:
            self.hidden[rows] = (slope @ weight).to(self.hidden.dtype)
        if self.weight is not None and self.weight.dtype == slope.dtype:
            self.weight.addmm_(slope.T, part)
        elif self.weight is not None:
            self.weight += slope.T @ part
        if self.bias is not None:
            self.bias += slope.sum(dim=0)

    def finished(self) -> list[torch.Tensor | None]:
        """Return the gradients in the types of their inputs."""
        sums = (self.hidden, self.weight, self.bias)
        return [None if g is None else g.to(dtype) for g, dtype in zip(sums, self.types, strict=True)]
