"""Tensors of which each worker has a part, but which any code may use as if they were whole.

:class:`DividedTensor` has the shape of the whole tensor. Functions that need only the local part are applied to that
part. For all other functions the whole tensor is gathered first, so that the result is always right.

Logits whose last dimension, the words, is missing or divided on this worker are replaced by two kinds of objects.
Logits that are never computed are a tuple, because ZeRO-3 replaces tensors that a module returns. Divided logits are a
tensor, because any code may ask for the whole. :func:`rows_of_view`, :func:`flattens_rows` and :func:`selects_rows`
decide which operations on their rows are allowed. :func:`losses_and_slope` is the cross-entropy over a vocabulary of
which each worker has some words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import nn

from rapidformer_templates.errors import ModelError

TorchFunction = Callable[..., Any]
"""A function or method of torch."""

Handler = Callable[..., object]
"""Takes a function of torch and its arguments. Returns ``NotImplemented`` if it needs the whole tensor."""


class DividedTensor(torch.Tensor):
    """The local part of a tensor, which acts as the whole tensor. Shape, dtype and device describe the whole.

    Attributes:
        local: the part of this worker, with its autograd graph.
        handlers: replacements for torch functions that work on the part.
    """

    local: torch.Tensor
    handlers: ClassVar[dict[TorchFunction, Handler]] = {}

    def whole(self) -> torch.Tensor:
        """Gather a plain tensor with all values. Every worker of the group must call it."""
        raise NotImplementedError

    def with_local(self, local: torch.Tensor) -> Self:
        """Return a divided tensor with another local part."""
        raise NotImplementedError

    def view_rows(self, function: TorchFunction, rows: Sequence[int]) -> Self:
        """Return a view with other leading dimensions, by torch's ``view`` or ``reshape``."""
        raise NotImplementedError

    def select_rows(self, index: Any) -> Self:
        """Return the rows that an index selects."""
        raise NotImplementedError

    def cross_entropy(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        """Return torch's cross-entropy of logits (rows, words) or (words,) with class indices as targets.

        It may also return ``NotImplemented`` if that needs the whole tensor.
        """
        raise NotImplementedError

    def part_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the entries of a flattened per-row vector that belong to local rows."""
        return rows

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the workers what each of them has computed from its part."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: TorchFunction, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if function in _OF_THE_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        handler = cls.handlers.get(function) or _HANDLERS.get(function)
        result = NotImplemented if handler is None else handler(function, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if args and isinstance(args[0], DividedTensor) and _changes_in_place(function):
            raise ModelError(
                f"{function.__name__} changes a tensor of which this worker has only a part",
                where="the logits of a divided model",
                hint="use the function that returns a new tensor, such as masked_fill or where",
            )
        args, kwargs = torch.utils._pytree.tree_map_only(DividedTensor, lambda x: x.whole(), (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: object, *arguments: object) -> NoReturn:
        raise TypeError(f"{function} was called on a divided tensor below torch's Python functions; call whole()")


def _changes_in_place(function: TorchFunction) -> bool:
    """Whether a method changes values of its tensor. ``x += y`` does not count, as x then names the result."""
    name = function.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _OF_AUTOGRAD)


_OF_AUTOGRAD = ("requires_grad_", "detach_")

_T: Any = torch.Tensor
_OF_THE_WHOLE = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.layout.__get__, _T.ndim.__get__,
    _T.is_cuda.__get__, _T.is_meta.__get__, _T.is_sparse.__get__, _T.is_quantized.__get__, _T.is_nested.__get__,
    _T._base.__get__,
    _T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.element_size, _T.stride, _T.__len__,
    torch.numel, torch.is_floating_point, torch.is_complex,
}  # fmt: skip
"""Queries about the whole tensor that do not need its values."""


def call_on_local(function: TorchFunction, divided: DividedTensor, *args: object) -> object:
    """Apply a function to the local part, to query its autograd state or register a hook."""
    return function(divided.local, *args)


def elementwise(function: TorchFunction, divided: object, *args: object, **kwargs: object) -> object:
    """Apply a function to each value independently of the others."""
    if not isinstance(divided, DividedTensor) or any(isinstance(a, DividedTensor) for a in args):
        return NotImplemented
    result = function(divided.local, *args, **kwargs)
    return divided.with_local(result) if isinstance(result, torch.Tensor) else result


def with_scalar(function: TorchFunction, divided: object, other: object) -> object:
    """Apply a function of each value and one number. A trained number needs the gradients of all values."""
    if not isinstance(divided, DividedTensor) or isinstance(other, DividedTensor):
        return NotImplemented
    if isinstance(other, torch.Tensor) and (other.ndim > 0 or other.requires_grad) and function is not _T.type_as:
        return NotImplemented
    return divided.with_local(function(divided.local, other))


def view(function: TorchFunction, divided: DividedTensor, *shape: Any) -> object:
    """Reshape the rows of a tensor."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return NotImplemented
    rows = rows_of_view(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape, divided.shape)
    return NotImplemented if rows is None else divided.view_rows(function, rows)


def flatten(function: TorchFunction, divided: DividedTensor, start_dim: int = 0, end_dim: int = -1) -> object:
    """Flatten the rows of a tensor."""
    if not flattens_rows(divided.ndim, start_dim, end_dim):
        return NotImplemented
    rows = torch.empty((*divided.shape[:-1], 1), device="meta").flatten(start_dim, end_dim).shape[:-1]
    return divided.view_rows(torch.reshape, rows)


def has_divided(arguments: object) -> bool:
    """Return whether the arguments contain a divided tensor."""
    return any(isinstance(leaf, DividedTensor) for leaf in torch.utils._pytree.tree_leaves(arguments))


def select(function: TorchFunction, divided: DividedTensor, index: object) -> object:
    """Select rows of a tensor."""
    whole_rows = not has_divided(index) and selects_rows(index, divided.ndim)
    return divided.select_rows(index) if whole_rows else NotImplemented


def sum_of_all(function: TorchFunction, divided: DividedTensor, *args: object, **kwargs: object) -> object:
    """Sum all values. A sum over a dimension needs the whole tensor."""
    return NotImplemented if args or kwargs else divided.summed(divided.local.sum())


def cross_entropy(
    function: TorchFunction,
    input: object,
    target: object,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> object:
    """Compute ``torch.nn.functional.cross_entropy`` with class indices as targets, and without deprecated flags."""
    if not isinstance(input, DividedTensor) or not isinstance(target, torch.Tensor):
        return NotImplemented
    if size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point() or not target.ndim == input.ndim - 1 < 2:
        return NotImplemented
    return input.cross_entropy(target, weight, ignore_index, reduction, label_smoothing)


_HANDLERS: dict[TorchFunction, Handler] = {
    **dict.fromkeys(
        (_T.requires_grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T.register_hook), call_on_local
    ),
    **dict.fromkeys(
        (
            _T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.contiguous, _T.clone, _T.detach, _T.neg,
            _T.tanh, torch.clone, torch.detach, torch.neg, torch.tanh,
        ),
        elementwise,
    ),
    **dict.fromkeys(
        (_T.mul, _T.__mul__, _T.__rmul__, _T.div, _T.__truediv__, _T.add, _T.__add__, _T.sub, _T.__sub__, _T.type_as),
        with_scalar,
    ),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), view),
    **dict.fromkeys((_T.flatten, torch.flatten), flatten),
    **dict.fromkeys((_T.sum, torch.sum), sum_of_all),
    _T.__getitem__: select,
    nn.functional.cross_entropy: cross_entropy,
}  # fmt: skip
"""Handlers for every kind of divided tensor."""


def rows_of_view(sizes: Sequence[int], shape: Sequence[int]) -> list[int] | None:
    """Return the leading dimensions of a view, with a last -1 resolved. None if the view does not keep the words.

    Args:
        sizes: the arguments of ``view`` or ``reshape``.
        shape: shape of the logits.
    """
    *rows, words = sizes or (0,)
    if words == -1:
        others = math.prod(rows)
        words = math.prod(shape) // others if others > 0 else 0
    return rows if sizes and words == shape[-1] else None


def flattens_rows(dimensions: int, start: int, end: int) -> bool:
    """Return whether ``flatten`` keeps the last dimension."""
    last = dimensions - 1
    return end % dimensions != last or start % dimensions == last


def selects_rows(index: object, dimensions: int) -> bool:
    """Return whether an index takes all of the last dimension."""
    entries = index if isinstance(index, tuple) else (index,)
    # An index of bools consumes its own dimensions, any other entry one.
    named = sum(
        entry.ndim if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool else 1
        for entry in entries
        if entry is not None and entry is not Ellipsis
    )
    dots = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if isinstance(entries[-1], slice) and entries[-1] == slice(None) and len(dots) < 2:
        return True
    return named < dimensions and dots in ([], [len(entries) - 1])


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
