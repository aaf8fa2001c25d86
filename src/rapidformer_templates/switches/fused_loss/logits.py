"""Placeholder logits that are never computed. The output layer of a model returns them in training."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.nn import functional as F  # noqa: N812

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.divided_tensor import DividedTensor, flattens_rows, rows_of_view, selects_rows
from rapidformer_templates.switches.fused_loss.linear_cross_entropy import (
    Cast,
    LossRecipe,
    Pointwise,
    Scale,
    Shift,
    Tanh,
)

if TYPE_CHECKING:
    from rapidformer_templates.switches.fused_loss.transform import FusedHead

SWITCH_FLAG = "--fused-linear-cross-entropy"


@dataclass(frozen=True, eq=False, repr=False)
class _Origin:
    """Everything that logits depend on, except the hidden states.

    Attributes:
        head: the layer.
        pointwise: functions that the model has applied to each logit since.
        dtype: type of the result.
        totals: sums of losses that were computed from them.
    """

    head: FusedHead
    pointwise: tuple[Pointwise, ...]
    dtype: torch.dtype
    totals: list[torch.Tensor] = field(default_factory=list)


class Logits(tuple[object, ...]):
    """Placeholder for the logits of a model in training. Their cross-entropy is computed without the logits.

    Operations of the model on its logits are applied to their sources. Selecting and reshaping rows is applied
    to the hidden states, and functions of each number are applied to each chunk later.

    It is a tuple (origin, hidden states), because ZeRO-3 and DDP look for tensors in a module's output, and ZeRO-3
    replaces them. They find the hidden states by iteration, so iteration must be that of a tuple.

    Raises:
        ModelError: for every other operation.
    """

    @classmethod
    def of(cls, head: FusedHead, hidden: torch.Tensor) -> Logits:
        """Return the logits that ``head`` would compute for ``hidden``, which has shape (..., hidden size)."""
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        return cls((_Origin(head, (), torch.get_autocast_dtype(device) if autocast else hidden.dtype), hidden))

    @property
    def _origin(self) -> _Origin:
        return cast(_Origin, tuple.__getitem__(self, 0))

    @property
    def _hidden(self) -> torch.Tensor:
        return cast(torch.Tensor, tuple.__getitem__(self, 1))

    def _of_rows(self, hidden: torch.Tensor) -> Logits:
        return Logits((self._origin, hidden))

    def _then(self, step: Pointwise, dtype: torch.dtype | None = None) -> Logits:
        origin = self._origin
        changed = replace(origin, pointwise=(*origin.pointwise, step), dtype=dtype or origin.dtype)
        return Logits((changed, self._hidden))

    # Properties.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._origin.head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        return self._origin.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> int | torch.Size:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # Selecting and reshaping rows.

    def view(self, *shape: Any) -> Logits:
        rows = rows_of_view(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, self.shape)
        if rows is None:
            _refuse(f"a shape of {tuple(shape)}, which cuts their {self.shape[-1]} words")
        return self._of_rows(self._hidden.reshape(*rows, self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        if not flattens_rows(self.ndim, start_dim, end_dim):
            _refuse("flattening their words")
        return self._of_rows(self._hidden.flatten(start_dim, end_dim))

    def contiguous(self) -> Logits:
        return self

    def __getitem__(self, index: Any) -> Logits:
        if not selects_rows(index, self.ndim):
            _refuse(f"the part {index!r}")
        return self._of_rows(self._hidden[index])

    # Functions of each number.

    def to(self, kind: torch.dtype | torch.device | str) -> Logits:
        if isinstance(kind, torch.dtype):
            return self._then(Cast(kind), kind)
        if torch.device(kind).type != self.device.type:
            _refuse(f"moving them to {kind}")
        return self

    def float(self) -> Logits:
        return self.to(torch.float32)

    def tanh(self) -> Logits:
        return self._then(Tanh())

    def __mul__(self, factor: Any) -> Logits:
        return self._then(Scale(float(factor)))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        return self._then(Scale(1.0 / float(divisor)))

    def __add__(self, constant: object) -> Logits:
        if (
            not isinstance(constant, torch.Tensor)
            or constant.requires_grad
            or constant.shape[-1:] != self.shape[-1:]
            or math.prod(constant.shape[:-1]) != 1
        ):
            _refuse("a sum with anything but a constant for each word")
        return self._then(Shift(constant.reshape(1, -1).to(self.dtype)))

    # The loss.

    def cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> torch.Tensor:
        """Like ``torch.nn.functional.cross_entropy`` of (rows, words) and (rows,), with reduction mean or sum."""
        if weight is not None or size_average is not None or reduce is not None or reduction == "none":
            _refuse("a cross-entropy with weights or without a sum over the rows")
        if self.ndim != 2 or target.ndim != 1 or target.is_floating_point():
            _refuse(f"a cross-entropy of {tuple(self.shape)} and {tuple(target.shape)}, not of rows and their words")
        recipe = LossRecipe(self._origin.pointwise, ignore_index, label_smoothing)
        hidden = self._hidden
        if isinstance(hidden, DividedTensor):
            total = hidden.summed(self._origin.head.loss(hidden.local, hidden.part_of(target), recipe))
        else:
            total = self._origin.head.loss(hidden, target, recipe)
        self._origin.totals.append(total)
        return total if reduction == "sum" else total / (target != ignore_index).sum()

    def zero_through_model(self) -> torch.Tensor:
        """Return a zero that depends on everything that these logits would depend on.

        It uses a computed sum, if there is one, because a second call of the head would gather a sharded weight
        on this worker only. The sum is finite even if no row counts, while the mean would be 0/0. It also uses the
        hidden states, because an engine watches them at the end of the model.
        """
        if self._origin.totals:
            return self._origin.totals[-1] * 0.0 + self._hidden.sum() * 0.0
        row = self._hidden.reshape(-1, self._hidden.shape[-1])[:1]
        return self._of_rows(row).cross_entropy(row.new_full((len(row),), -100, dtype=torch.long), reduction="sum")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> torch.Tensor | Logits:
        if function is F.cross_entropy and isinstance(args[0], cls):
            return args[0].cross_entropy(*args[1:], **(kwargs or {}))
        if function is torch.tanh:
            return args[0].tanh()
        return _refuse(f"torch's {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(f"their {name}")


def _refuse(what: str) -> NoReturn:
    raise ModelError(
        f"something asks the logits of a training step for {what}, and there are none",
        where=SWITCH_FLAG,
        hint=f"take the loss from torch's cross_entropy of whole rows of logits, or leave {SWITCH_FLAG} out",
    )


OPERATORS = ("sub", "rsub", "neg", "pow", "matmul", "radd", "rtruediv", "eq", "ne", "lt", "le", "gt", "ge", "contains")
"""Operators of tensors that tuples lack or define with another meaning."""

for _name in OPERATORS:
    setattr(Logits, f"__{_name}__", lambda self, *others, name=_name: _refuse(f"the operator {name}"))
