"""Hidden states and logits whose rows are divided over workers by token, and their cross-entropy.

:class:`DividedRows` acts as the whole tensor. So everything after a model's last block (its norm, its head, its own
loss or a user's loss) sees the whole shape. Operations on separate rows run on the local rows only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from rapidformer_templates.models.divided_tensor import (
    DividedTensor,
    Handler,
    TorchFunction,
    has_class_indices,
    selects_rows,
)
from rapidformer_templates.switches.layout.collectives import Peers, all_reduce_both_ways

Places = NDArray[np.int64]


class DividedRows(DividedTensor):
    """A tensor (…, features) in which each worker has some of the rows.

    Attributes:
        local: this worker's rows, of shape (rows, features), with the autograd graph. They may be divided further.
        places: indices of these rows in the flattened whole. A numpy array, because its values are known even while a
            model's shapes are planned and its tensors have no data.
        peers: the workers that have the other rows.
    """

    handlers: ClassVar[dict[TorchFunction, Handler]] = {}
    places: Places
    peers: Peers

    @staticmethod
    def __new__(cls, local: torch.Tensor, rows: Sequence[int], places: Places, peers: Peers) -> DividedRows:
        shape = (*rows, local.shape[-1])
        self: DividedRows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local, self.places, self.peers = local, places, peers
        return self

    def __init__(self, local: torch.Tensor, rows: Sequence[int], places: Places, peers: Peers) -> None:
        """``rows`` is the shape of the whole tensor without its last dimension."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the whole tensor without its last dimension."""
        return tuple(self.shape[:-1])

    def whole(self) -> torch.Tensor:
        """Gather all rows into a plain tensor. Call it on every worker of the group."""
        local = self.local.whole() if isinstance(self.local, DividedTensor) else self.local
        return self.scattered(local).view(self.shape)

    def scattered(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the values of all rows, flattened, in the order of the whole tensor."""
        filled = local.new_zeros(math.prod(self.rows), *local.shape[1:])
        return all_reduce_both_ways(filled.index_copy(0, self._index(local), local), self.peers)

    def _index(self, like: torch.Tensor) -> torch.Tensor:
        """Return the places as an index tensor on the device of ``like``."""
        return torch.tensor(self.places, device=like.device)

    def part_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self._index(rows)]

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return all_reduce_both_ways(part, self.peers)

    def with_local(self, local: torch.Tensor) -> DividedRows:
        """Return other values for the same rows."""
        return DividedRows(local, self.rows, self.places, self.peers)

    def view_rows(self, function: TorchFunction, rows: Sequence[int]) -> DividedRows:
        others = -math.prod(rows) if -1 in rows else 1
        missing = math.prod(self.rows) // max(others, 1)
        return DividedRows(self.local, [missing if size == -1 else size for size in rows], self.places, self.peers)

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return f"DividedRows({tuple(self.shape)}, {len(self.places)} rows here)"


_T = torch.Tensor
_handles = DividedRows.handles


@_handles(
    _T.pow, _T.square, _T.rsqrt, _T.sqrt, _T.exp, _T.abs, _T.sigmoid, _T.relu, torch.pow, torch.square, torch.rsqrt,
    torch.sqrt, torch.exp, torch.abs, torch.sigmoid, torch.relu, functional.gelu, functional.silu, functional.relu,
    functional.tanh, functional.dropout, functional.softplus,
)  # fmt: skip
def _each_value(function: TorchFunction, divided: object, *args: object, **kwargs: object) -> object:
    if not isinstance(divided, DividedRows) or kwargs.get("inplace") or _has_divided((args, kwargs)):
        return NotImplemented
    if any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        return NotImplemented
    return divided.with_local(function(divided.local, *args, **kwargs))


@_handles(functional.linear, functional.layer_norm, functional.rms_norm)
def _each_row(function: TorchFunction, divided: object, *args: object, **kwargs: object) -> object:
    """A product with a matrix, or a norm over the last dimension."""
    if not isinstance(divided, DividedRows) or _has_divided((args, kwargs)):
        return NotImplemented
    shape = args[0] if args else kwargs.get("normalized_shape")
    if function is not functional.linear and len(tuple(shape)) != 1:  # type: ignore[arg-type]
        return NotImplemented
    return divided.with_local(function(divided.local, *args, **kwargs))


@_handles(_T.mean, torch.mean, _T.var, torch.var)
def _over_features(
    function: TorchFunction, divided: DividedRows, dim: object = None, *args: object, **kwargs: object
) -> object:
    last = dim in (-1, divided.ndim - 1, (-1,), [-1])
    if not last or not kwargs.get("keepdim") or _has_divided((args, kwargs)):
        return NotImplemented
    return divided.with_local(function(divided.local, -1, *args, **kwargs))


@_handles(
    _T.mul, _T.__mul__, _T.__rmul__, _T.div, _T.__truediv__, _T.add, _T.__add__, _T.__radd__, _T.sub, _T.__sub__,
    torch.mul, torch.div, torch.add, torch.sub,
)  # fmt: skip
def _with_another(function: TorchFunction, one: object, other: object, **kwargs: object) -> object:
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
    return value if vector and not isinstance(value, DividedTensor) else NotImplemented


def _has_divided(arguments: object) -> bool:
    """Return whether the arguments contain a divided tensor."""
    return any(isinstance(leaf, DividedTensor) for leaf in torch.utils._pytree.tree_leaves(arguments))


@_handles(_T.__getitem__)
def _select(function: TorchFunction, divided: DividedRows, index: object) -> object:
    if _has_divided(index) or not selects_rows(index, divided.ndim):
        return NotImplemented
    count, local_count = math.prod(divided.rows), len(divided.places)
    numbers = np.arange(count).reshape(*divided.rows, 1)
    chosen = numbers[torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.cpu().numpy(), index)]
    rank = np.full(count, -1)
    rank[divided.places] = np.arange(local_count)
    chosen_here = rank[chosen.reshape(-1)]
    (places,) = (chosen_here >= 0).nonzero()
    local, order = divided.local, chosen_here[places]
    if not np.array_equal(order, np.arange(local_count)):
        local = local[torch.tensor(order, device=local.device)]
    return DividedRows(local, chosen.shape[:-1], places, divided.peers)


@_handles(functional.cross_entropy)
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
    """``torch.nn.functional.cross_entropy`` of logits (rows, tokens) or (tokens,) with class indices as targets."""
    if not isinstance(input, DividedRows) or not has_class_indices(input, target, size_average, reduce):
        return NotImplemented
    targets = target.reshape(-1)
    losses = function(
        input.local,
        input.part_of(targets),
        weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        return input.scattered(losses).view(target.shape)
    loss = input.summed(losses)
    if reduction == "sum":
        return loss
    counts = targets != ignore_index
    return loss / (counts.sum() if weight is None else weight[targets.where(counts, 0)][counts].sum())


class OnRows:
    """The forward of a module that processes each row separately and has its own collectives."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward

    def __call__(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if not isinstance(x, DividedRows):
            return self.forward(x, *args, **kwargs)
        return x.with_local(self.forward(x.local[None], *args, **kwargs)[0])
