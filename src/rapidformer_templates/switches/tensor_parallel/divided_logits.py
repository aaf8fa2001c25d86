"""Logits that stay divided over the vocabulary, and the cross-entropy that needs no more of them.

:class:`DividedLogits` stands for the whole tensor of logits: a model's own loss and a user's code see the whole shape
and call ``float``, ``view``, slices and ``torch.nn.functional.cross_entropy`` on it as on any tensor. Only what needs
the columns of other workers for itself gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional

from rapidformer_templates.errors import DataError
from rapidformer_templates.models.divided_tensor import DividedTensor, Handler
from rapidformer_templates.models.logits_shape import flattens_rows, rows_of_view, selects_rows
from rapidformer_templates.switches.tensor_parallel.collectives import Peers, gather, sum_partial


class DividedLogits(DividedTensor):
    """Logits of which each worker has a share of the last dimension. Shape, type and device are those of the whole.

    Attributes:
        local: this worker's columns, with the graph.
        peers: the workers that have the others.
    """

    handlers: ClassVar[dict[Any, Handler]] = {}
    peers: Peers

    @staticmethod
    def __new__(cls, local: torch.Tensor, peers: Peers, vocabulary: int) -> DividedLogits:
        shape = (*local.shape[:-1], vocabulary)
        self: DividedLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        self.peers = peers
        return self

    def __init__(self, local: torch.Tensor, peers: Peers, vocabulary: int) -> None:
        """``local``: (…, this worker's tokens); ``vocabulary``: all tokens."""

    def whole(self) -> torch.Tensor:
        """The logits of all tokens as a plain tensor; every worker of the group must ask for it."""
        return gather(self.local, self.peers, -1, self.shape[-1], partial=False)

    def with_local(self, local: torch.Tensor) -> DividedLogits:
        """Other values for the same tokens."""
        return DividedLogits(local, self.peers, self.shape[-1])

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"DividedLogits({tuple(self.shape)}, {self.local.shape[-1]} columns here)"


_T: Any = torch.Tensor
_handles = DividedLogits.handles


@_handles(_T.view, _T.reshape, torch.reshape)
def _view(function: Any, logits: DividedLogits, *shape: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return NotImplemented
    rows = rows_of_view(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape, logits.shape)
    if rows is None:
        return NotImplemented
    return logits.with_local(function(logits.local, (*rows, logits.local.shape[-1])))


@_handles(_T.flatten, torch.flatten)
def _flatten(function: Any, logits: DividedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not flattens_rows(logits.ndim, start_dim, end_dim):
        return NotImplemented
    return logits.with_local(function(logits.local, start_dim, end_dim))


@_handles(_T.__getitem__)
def _select(function: Any, logits: DividedLogits, index: Any) -> Any:
    if any(isinstance(entry, DividedLogits) for entry in (index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    return logits.with_local(logits.local[index]) if selects_rows(index, logits.ndim) else NotImplemented


@_handles(_T.sum, torch.sum)
def _sum(function: Any, logits: DividedLogits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else sum_partial(logits.local.sum(), logits.peers)


@_handles(functional.cross_entropy)
def _cross_entropy(
    function: Any,
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy`` of logits (samples, tokens) or (tokens,) and the indices of targets."""
    old = size_average is not None or reduce is not None
    by_index = isinstance(target, torch.Tensor) and not target.is_floating_point() and target.ndim == input.ndim - 1
    if old or weight is not None or not by_index or input.ndim > 2 or not isinstance(input, DividedLogits):
        return NotImplemented
    local = input.local
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()  # as autocast does before every cross-entropy
    begin, _ = input.peers.share(input.shape[-1])
    rows = local.reshape(-1, local.shape[-1])
    kind = rows.dtype
    if kind in (torch.float16, torch.bfloat16):
        rows = rows.float()
    losses = _CrossEntropy.apply(
        rows, target.reshape(-1), input.peers, begin, input.shape[-1], ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(target.shape).to(kind)
    total = losses.sum()
    return (total / (target != ignore_index).sum() if reduction == "mean" else total).to(kind)


def check_inside(inside: torch.Tensor, vocabulary: int, what: str) -> None:
    """Refuse tokens beyond the vocabulary, which no worker has; the host does not wait for a GPU's answer.

    A GPU asserts it by itself, as for an index that torch looks up whole, and ends the process.

    Args:
        inside: which are of the vocabulary.
        what: they are.

    Raises:
        DataError: on a CPU.
    """
    message = f"a {what} is not one of the {vocabulary} tokens of the model"
    try:
        torch._assert_async(inside.all(), message)
    except RuntimeError as error:
        if message not in str(error):
            raise
        raise DataError(
            message,
            where="the divided vocabulary (--tensor-model-parallel-size)",
            hint="use the model's own tokenizer; its ids go from 0 to the vocabulary size, without it",
        ) from None


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of each row, as in Shoeybi et al., 2019: the workers exchange three numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        peers: Peers,
        begin: int,
        vocabulary: int,
        ignored: int,
        smoothing: float,
    ) -> torch.Tensor:
        counts = target != ignored
        valid = (target >= 0) & (target < vocabulary)
        check_inside(valid | ~counts, vocabulary, "target")
        here = (target >= begin) & (target < begin + logits.shape[-1]) & counts
        column = (target - begin).masked_fill(~here, 0).unsqueeze(-1)
        shifted = logits - peers.max(logits.amax(dim=-1)).unsqueeze(-1)
        picked = shifted.gather(-1, column).squeeze(-1).masked_fill(~here, 0.0)
        logits_sum = shifted.sum(-1) if smoothing else torch.zeros_like(picked)
        shares = shifted.exp_()
        scale, picked, logits_sum = peers.sum(torch.stack([shares.sum(-1), picked, logits_sum]))
        shares /= scale.unsqueeze(-1)
        ctx.save_for_backward(shares, column, here, counts)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        loss = scale.log() - (1 - smoothing) * picked - smoothing / vocabulary * logits_sum
        return loss.masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, column, here, counts = ctx.saved_tensors
        gradient = gradient.masked_fill(~counts, 0.0).unsqueeze(-1)
        result = shares * gradient
        result.scatter_add_(-1, column, -(1 - ctx.smoothing) * gradient * here.unsqueeze(-1))
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.vocabulary * gradient
        return result, None, None, None, None, None, None
