"""Tensors of which each worker has a part, and that any code may use as if they were whole.

:class:`DividedTensor` has the shape of the whole. What is known to need no more than the part that is here is done
with that; before anything else the whole is put together, so that a result is right in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch

Handler = Callable[..., Any]


class DividedTensor(torch.Tensor):
    """A part of a tensor that stands for all of it. Shape, type and device are those of the whole.

    Attributes:
        local: the part of this worker, with the graph.
        handlers: what torch's functions do with the part, in the place of what they do; each is given the function
            and its arguments, and returns ``NotImplemented`` where it takes the whole.
    """

    local: torch.Tensor
    handlers: ClassVar[dict[Any, Handler]] = {}

    def whole(self) -> torch.Tensor:
        """A plain tensor with all values; every worker of the group must ask for it."""
        raise NotImplementedError

    def with_local(self, local: torch.Tensor) -> Self:
        """Other values in the place of the part."""
        raise NotImplementedError

    def part_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Of one value for each row, flattened, those of the rows that are here."""
        return rows

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the workers of what each has made of its part."""
        raise NotImplementedError

    @classmethod
    def handles(cls, *functions: Any) -> Callable[[Handler], Handler]:
        """Let a function stand for some of torch's."""

        def register(handler: Handler) -> Handler:
            cls.handlers.update(dict.fromkeys(functions, handler))
            return handler

        return register

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _OF_THE_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        handler = cls.handlers.get(function) or _HANDLERS.get(function)
        result = NotImplemented if handler is None else handler(function, *args, **kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = torch.utils._pytree.tree_map_only(DividedTensor, lambda x: x.whole(), (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{function} was called on a divided tensor beneath torch's Python functions; call whole()")


_T: Any = torch.Tensor
_OF_THE_WHOLE = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.layout.__get__, _T.ndim.__get__,
    _T.is_cuda.__get__, _T.is_meta.__get__, _T.is_sparse.__get__, _T.is_quantized.__get__, _T.is_nested.__get__,
    _T._base.__get__,
    _T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex, _T.element_size, _T.stride, _T.__len__,
    torch.numel, torch.is_floating_point, torch.is_complex,
}  # fmt: skip
"""What is asked of the whole and answered without its values."""


def of_the_graph(function: Any, divided: DividedTensor, *args: Any) -> Any:
    """What the part knows, or is told."""
    return function(divided.local, *args)


def each_by_itself(function: Any, divided: Any, *args: Any, **kwargs: Any) -> Any:
    """What is done with each value, whatever the others are."""
    if not isinstance(divided, DividedTensor) or any(isinstance(a, DividedTensor) for a in args):
        return NotImplemented
    result = function(divided.local, *args, **kwargs)
    return divided.with_local(result) if isinstance(result, torch.Tensor) else result


def with_a_number(function: Any, divided: Any, other: Any) -> Any:
    """What is done with each value and one number."""
    if not isinstance(divided, DividedTensor) or isinstance(other, DividedTensor):
        return NotImplemented
    if isinstance(other, torch.Tensor) and other.ndim > 0 and function is not _T.type_as:
        return NotImplemented
    return divided.with_local(function(divided.local, other))


def is_by_index(logits: Any, target: Any, size_average: Any, reduce: Any) -> bool:
    """Whether a cross-entropy is of logits (rows, words) or (words,) and the indices of targets, without old flags."""
    if size_average is not None or reduce is not None or not isinstance(target, torch.Tensor):
        return False
    return not target.is_floating_point() and target.ndim == logits.ndim - 1 < 2


_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((_T.requires_grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T.register_hook), of_the_graph),
    **dict.fromkeys(
        (
            _T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.contiguous, _T.clone, _T.detach, _T.neg,
            _T.tanh, torch.clone, torch.detach, torch.neg, torch.tanh,
        ),
        each_by_itself,
    ),
    **dict.fromkeys(
        (_T.mul, _T.__mul__, _T.__rmul__, _T.div, _T.__truediv__, _T.add, _T.__add__, _T.sub, _T.__sub__, _T.type_as),
        with_a_number,
    ),
}  # fmt: skip
"""What every kind of divided tensor does alike."""
