"""What models do to each logit before the loss, with its derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Pointwise(Protocol):
    """A function of single logits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The values for a chunk of logits, of shape (rows, vocabulary)."""

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """From the gradient of the values ``y`` to that of what they were computed from."""


@dataclass(frozen=True)
class Cast:
    """Another number format, as ``logits.float()``."""

    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient  # it takes the type of the product that it goes into


@dataclass(frozen=True)
class Scale:
    """Times a number."""

    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor


@dataclass(frozen=True)
class Shift:
    """Plus a constant for each word, of shape (1, vocabulary)."""

    constant: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.constant.to(x.device)

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient


@dataclass(frozen=True)
class Tanh:
    """The hyperbolic tangent, by which some models cap their logits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def slope(self, gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient * (1 - y * y)
