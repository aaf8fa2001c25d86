"""Tensors whose words or rows are divided over workers, and cross-entropies that do not gather them.

Both kinds act as the whole tensor. A model's own loss and a user's code see the whole shape and call ``float``,
``view``, slices and ``torch.nn.functional.cross_entropy`` on them as on any tensor. In :class:`DividedLogits`, tensor
parallelism divides the words. In :class:`DividedRows`, context parallelism divides the tokens of everything after a
model's last block: its norm, its head and the loss. Values of other workers are gathered only for operations that need
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from rapidformer_templates.engines.collectives import Peers, all_reduce, all_reduce_both_ways, gather
from rapidformer_templates.errors import DataError
from rapidformer_templates.models import divided_tensor
from rapidformer_templates.models.blocks import WrappedForward
from rapidformer_templates.system import accelerator


class DividedLogits(divided_tensor.DividedTensor):
    """Logits with the last dimension divided over workers. Shape, type and device describe the whole tensor.

    Attributes:
        local: this worker's columns, with the autograd graph.
        peers: the workers that have the other columns.
    """

    peers: Peers

    @staticmethod
    def __new__(cls, local: torch.Tensor, peers: Peers, vocabulary: int) -> DividedLogits:
        """``local`` has the shape (…, this worker's tokens). ``vocabulary`` is the number of all tokens."""
        shape = (*local.shape[:-1], vocabulary)
        self: DividedLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        self.peers = peers
        return self

    def whole(self) -> torch.Tensor:
        """Gather the logits of all tokens into a plain tensor. Call it on every worker of the group."""
        return gather(self.local, self.peers, -1, self.shape[-1], partial=False)

    def with_local(self, local: torch.Tensor) -> DividedLogits:
        """Return other values for the same tokens."""
        return DividedLogits(local, self.peers, self.shape[-1])

    def view_rows(self, function: divided_tensor.TorchFunction, rows: Sequence[int]) -> DividedLogits:
        return self.with_local(function(self.local, (*rows, self.local.shape[-1])))

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return all_reduce(part, self.peers)

    def select_rows(self, index: Any) -> DividedLogits:
        return self.with_local(self.local[index])

    def cross_entropy(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        if weight is not None:
            return NotImplemented
        local = self.local
        # Autocast computes every cross-entropy in fp32.
        kind = torch.float32 if torch.is_autocast_enabled(local.device.type) else local.dtype
        words = DividedVocabularyShard(self.peers, self.shape[-1])
        rows, targets = local.reshape(-1, local.shape[-1]), target.reshape(-1)
        losses: torch.Tensor = _CrossEntropy.apply(rows, targets, words, ignored, smoothing)
        if reduction == "none":
            return losses.view(target.shape).to(kind)
        total = losses.sum()
        return (total / (target != ignored).sum() if reduction == "mean" else total).to(kind)

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return f"DividedLogits({tuple(self.shape)}, {self.local.shape[-1]} columns here)"


class DividedVocabularyShard(divided_tensor.VocabularyShard):
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
        hint = "use the model's own tokenizer; its ids go from 0 to the vocabulary size, without it"
        raise DataError(message, where="the divided vocabulary (--tensor-model-parallel-size)", hint=hint) from None


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row, in fp32 or fp64."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        words: divided_tensor.VocabularyShard,
        ignored: int,
        smoothing: float,
    ) -> torch.Tensor:
        losses, slope = divided_tensor.losses_and_slope(logits, target, words, ignored, smoothing)
        ctx.save_for_backward(slope, target != ignored)
        ctx.kind = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        slope, counts = ctx.saved_tensors
        gradient = gradient.masked_fill(~counts, 0.0).unsqueeze(-1)  # not finite for a mean over no targets
        return (slope * gradient).to(ctx.kind), None, None, None, None


Places = NDArray[np.int64]


class DividedRows(divided_tensor.DividedTensor):
    """A tensor (…, features) in which each worker has some of the rows.

    Attributes:
        local: this worker's rows, of shape (rows, features), with the autograd graph. They may be divided further.
        places: indices of these rows in the flattened whole. A numpy array, because its values are known even while a
            model's shapes are planned and its tensors have no data.
        peers: the workers that have the other rows.
    """

    places: Places
    peers: Peers

    @staticmethod
    def __new__(cls, local: torch.Tensor, rows: Sequence[int], places: Places, peers: Peers) -> DividedRows:
        """``rows`` is the shape of the whole tensor without its last dimension."""
        shape = (*rows, local.shape[-1])
        self: DividedRows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local, self.places, self.peers = local, places, peers
        return self

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the whole tensor without its last dimension."""
        return tuple(self.shape[:-1])

    def whole(self) -> torch.Tensor:
        """Gather all rows into a plain tensor. Call it on every worker of the group."""
        local = self.local.whole() if isinstance(self.local, divided_tensor.DividedTensor) else self.local
        return self.scattered(local).view(self.shape)

    def scattered(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the values of all rows, flattened, in the order of the whole tensor."""
        filled = local.new_zeros(math.prod(self.rows), *local.shape[1:])
        return all_reduce_both_ways(filled.index_copy(0, self._index(local), local), self.peers)

    def _index(self, like: torch.Tensor) -> torch.Tensor:
        """Return the places as an index tensor on the device of ``like``."""
        return accelerator.sent(self.places, like.device)

    def part_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self._index(rows)]

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return all_reduce_both_ways(part, self.peers)

    def with_local(self, local: torch.Tensor) -> DividedRows:
        """Return other values for the same rows."""
        return DividedRows(local, self.rows, self.places, self.peers)

    def view_rows(self, function: divided_tensor.TorchFunction, rows: Sequence[int]) -> DividedRows:
        others = -math.prod(rows) if -1 in rows else 1
        missing = math.prod(self.rows) // max(others, 1)
        return DividedRows(self.local, [missing if size == -1 else size for size in rows], self.places, self.peers)

    def select_rows(self, index: Any) -> DividedRows:
        count, local_count = math.prod(self.rows), len(self.places)
        numbers = np.arange(count).reshape(*self.rows, 1)
        chosen = numbers[torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.cpu().numpy(), index)]
        rank = np.full(count, -1)
        rank[self.places] = np.arange(local_count)
        chosen_here = rank[chosen.reshape(-1)]
        (places,) = (chosen_here >= 0).nonzero()
        local, order = self.local, chosen_here[places]
        if not np.array_equal(order, np.arange(local_count)):
            local = local[accelerator.sent(order, local.device)]
        return DividedRows(local, chosen.shape[:-1], places, self.peers)

    def cross_entropy(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        targets = target.reshape(-1)
        losses = functional.cross_entropy(
            self.local,
            self.part_of(targets),
            weight,
            ignore_index=ignored,
            reduction="none" if reduction == "none" else "sum",
            label_smoothing=smoothing,
        )
        if reduction == "none":
            return self.scattered(losses).view(target.shape)
        loss = self.summed(losses)
        if reduction == "sum":
            return loss
        counts = targets != ignored
        return loss / (counts.sum() if weight is None else weight[targets.where(counts, 0)][counts].sum())

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return f"DividedRows({tuple(self.shape)}, {len(self.places)} rows here)"


def _each_value(function: divided_tensor.TorchFunction, divided: object, *args: object, **kwargs: object) -> object:
    if not isinstance(divided, DividedRows) or kwargs.get("inplace") or divided_tensor.has_divided((args, kwargs)):
        return NotImplemented
    if any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        return NotImplemented
    return divided.with_local(function(divided.local, *args, **kwargs))


def _dropout(
    function: divided_tensor.TorchFunction,
    divided: DividedRows,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> object:
    """Draw for the rows of all workers, so that each has the random numbers of one process, and use the local ones."""
    if inplace:
        return NotImplemented
    if not training or not p:
        return divided
    rows = torch.ones(math.prod(divided.rows), divided.shape[-1], dtype=divided.dtype, device=divided.device)
    return divided.with_local(divided.local * divided.part_of(function(rows, p)))


def _each_row(function: divided_tensor.TorchFunction, divided: object, *args: object, **kwargs: object) -> object:
    """A product with a matrix, or a norm over the last dimension."""
    if not isinstance(divided, DividedRows) or divided_tensor.has_divided((args, kwargs)):
        return NotImplemented
    shape = args[0] if args else kwargs.get("normalized_shape")
    if function is not functional.linear and len(tuple(shape)) != 1:  # type: ignore[arg-type]
        return NotImplemented
    return divided.with_local(function(divided.local, *args, **kwargs))


def _over_features(
    function: divided_tensor.TorchFunction, divided: DividedRows, dim: object = None, *args: object, **kwargs: object
) -> object:
    last = dim in (-1, divided.ndim - 1, (-1,), [-1])
    if not last or not kwargs.get("keepdim") or divided_tensor.has_divided((args, kwargs)):
        return NotImplemented
    return divided.with_local(function(divided.local, -1, *args, **kwargs))


def _with_another(function: divided_tensor.TorchFunction, one: object, other: object, **kwargs: object) -> object:
    """Combine divided rows with a number, a vector of features, or other divided rows at the same places."""
    divided = one if isinstance(one, DividedRows) else other
    if kwargs or not isinstance(divided, DividedRows):
        return NotImplemented
    values = [_matching_local(divided, value) for value in (one, other)]
    if any(value is NotImplemented for value in values):
        return NotImplemented
    return divided.with_local(function(*values))


def _matching_local(divided: DividedRows, value: object) -> object:
    """Return the value to combine with the local rows of ``divided``, or NotImplemented."""
    if isinstance(value, DividedRows):
        same = value.rows == divided.rows and value.places is divided.places
        return value.local if same else NotImplemented
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    vector = value.ndim == 1 and divided.ndim > 1 and value.shape[0] in (1, divided.shape[-1])
    return value if vector and not isinstance(value, divided_tensor.DividedTensor) else NotImplemented


_T = torch.Tensor
DividedRows.handlers = {
    **dict.fromkeys(
        (
            _T.pow, _T.square, _T.rsqrt, _T.sqrt, _T.exp, _T.abs, _T.sigmoid, _T.relu, torch.pow, torch.square,
            torch.rsqrt, torch.sqrt, torch.exp, torch.abs, torch.sigmoid, torch.relu, functional.gelu, functional.silu,
            functional.relu, functional.tanh, functional.softplus,
        ),
        _each_value,
    ),
    functional.dropout: _dropout,
    **dict.fromkeys((functional.linear, functional.layer_norm, functional.rms_norm), _each_row),
    **dict.fromkeys((_T.mean, torch.mean, _T.var, torch.var), _over_features),
    **dict.fromkeys(
        (
            _T.mul, _T.__mul__, _T.__rmul__, _T.div, _T.__truediv__, _T.add, _T.__add__, _T.__radd__, _T.sub,
            _T.__sub__, torch.mul, torch.div, torch.add, torch.sub,
        ),
        _with_another,
    ),
}  # fmt: skip


class OnRows(WrappedForward):
    """The forward of a module that processes each row separately and has its own collectives."""

    def __call__(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if not isinstance(x, DividedRows):
            result: torch.Tensor = self.forward(x, *args, **kwargs)
            return result
        return x.with_local(self.forward(x.local[None], *args, **kwargs)[0])
