"""Logits that stay divided over the vocabulary, and a cross-entropy that does not gather them.

:class:`DividedLogits` acts as the whole tensor of logits. A model's own loss and a user's code see the whole shape and
call ``float``, ``view``, slices and ``torch.nn.functional.cross_entropy`` on it as on any tensor. The columns are
gathered only for operations that need those of other workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from rapidformer_templates.errors import DataError
from rapidformer_templates.models.divided_tensor import (
    DividedTensor,
    Handler,
    TorchFunction,
    VocabularyShard,
    has_class_indices,
    losses_and_slope,
    selects_rows,
)
from rapidformer_templates.switches.layout.collectives import Peers, all_reduce, gather


class DividedLogits(DividedTensor):
    """Logits with the last dimension divided over workers. Shape, type and device describe the whole tensor.

    Attributes:
        local: this worker's columns, with the autograd graph.
        peers: the workers that have the other columns.
    """

    handlers: ClassVar[dict[TorchFunction, Handler]] = {}
    peers: Peers

    @staticmethod
    def __new__(cls, local: torch.Tensor, peers: Peers, vocabulary: int) -> DividedLogits:
        shape = (*local.shape[:-1], vocabulary)
        self: DividedLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        self.peers = peers
        return self

    def __init__(self, local: torch.Tensor, peers: Peers, vocabulary: int) -> None:
        """``local`` has the shape (…, this worker's tokens). ``vocabulary`` is the number of all tokens."""

    def whole(self) -> torch.Tensor:
        """Gather the logits of all tokens into a plain tensor. Call it on every worker of the group."""
        return gather(self.local, self.peers, -1, self.shape[-1], partial=False)

    def with_local(self, local: torch.Tensor) -> DividedLogits:
        """Return other values for the same tokens."""
        return DividedLogits(local, self.peers, self.shape[-1])

    def view_rows(self, function: TorchFunction, rows: Sequence[int]) -> DividedLogits:
        return self.with_local(function(self.local, (*rows, self.local.shape[-1])))

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return all_reduce(part, self.peers)

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return f"DividedLogits({tuple(self.shape)}, {self.local.shape[-1]} columns here)"


@DividedLogits.handles(torch.Tensor.__getitem__)
def _select(function: TorchFunction, logits: DividedLogits, index: Any) -> object:
    if any(isinstance(entry, DividedLogits) for entry in (index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    return logits.with_local(logits.local[index]) if selects_rows(index, logits.ndim) else NotImplemented


@DividedLogits.handles(functional.cross_entropy)
def _cross_entropy(
    function: TorchFunction,
    input: object,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> object:
    """``torch.nn.functional.cross_entropy`` of logits (samples, tokens) or (tokens,) with class indices as targets."""
    if not isinstance(input, DividedLogits) or not has_class_indices(input, target, size_average, reduce):
        return NotImplemented
    if weight is not None:
        return NotImplemented
    local = input.local
    # Autocast computes every cross-entropy in fp32.
    kind = torch.float32 if torch.is_autocast_enabled(local.device.type) else local.dtype
    words = DividedVocabularyShard(input.peers, input.shape[-1])
    losses = _CrossEntropy.apply(
        local.reshape(-1, local.shape[-1]), target.reshape(-1), words, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(target.shape).to(kind)
    total = losses.sum()
    return (total / (target != ignore_index).sum() if reduction == "mean" else total).to(kind)


class DividedVocabularyShard(VocabularyShard):
    """The range of the vocabulary whose logits are on this worker."""

    def __init__(self, peers: Peers, count: int) -> None:
        super().__init__(count)
        self.peers = peers
        self.begin, _ = peers.share(count)
        self.most = -(-count // peers.size)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return self.peers.max(values)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.peers.sum(values)

    def targets_here(self, target: torch.Tensor, counts: torch.Tensor, columns: int) -> torch.Tensor:
        valid = (target >= 0) & (target < self.count)
        check_inside(valid | ~counts, self.count, "target")
        return (target >= self.begin) & (target < self.begin + columns) & counts


def check_inside(inside: torch.Tensor, vocabulary: int, what: str) -> None:
    """Refuse tokens beyond the vocabulary, which no worker has. The host does not wait for a GPU.

    On a GPU, torch's assertion fails and ends the process, as for any index out of range.

    Args:
        inside: which tokens are in the vocabulary.
        what: the name of these tokens in the message.

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


class _CrossEntropyContext(FunctionCtx):
    kind: torch.dtype
    saved_tensors: tuple[torch.Tensor, torch.Tensor]


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row, in fp32 or fp64."""

    @staticmethod
    def forward(
        ctx: _CrossEntropyContext,
        logits: torch.Tensor,
        target: torch.Tensor,
        words: VocabularyShard,
        ignored: int,
        smoothing: float,
    ) -> torch.Tensor:
        losses, slope = losses_and_slope(logits, target, words, ignored, smoothing)
        ctx.save_for_backward(slope, target != ignored)
        ctx.kind = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: _CrossEntropyContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        slope, counts = ctx.saved_tensors
        gradient = gradient.masked_fill(~counts, 0.0).unsqueeze(-1)  # not finite for a mean over no targets
        return (slope * gradient).to(ctx.kind), None, None, None, None
