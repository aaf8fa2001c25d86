"""Functions that models apply to each logit before the loss, with their derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Pointwise(Protocol):
    """A function of single logits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values for a chunk of logits of shape (rows, vocabulary)."""

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient by the inputs, given the gradient by the values ``y``."""


@dataclass(frozen=True)
class Cast:
    """Conversion to another number format, such as ``logits.float()``."""

    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient  # it takes the type of the product that uses it


@dataclass(frozen=True)
class Scale:
    """Multiplication by a number."""

    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor


@dataclass(frozen=True)
class Shift:
    """Addition of a constant for each word, of shape (1, vocabulary)."""

    constant: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.constant.to(x.device)

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient


@dataclass(frozen=True)
class Tanh:
    """Hyperbolic tangent. Some models use it to cap their logits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient * (1 - y * y)
