"""Common code of optimizers: a step with its closure, and Adam's options with an update of one parameter at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class BaseOptimizer(Optimizer):
    """An optimizer that makes its updates in one method."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @abstractmethod
    def _update_all(self) -> None:
        """Update all parameters that have a gradient. Called without recording gradients."""


@dataclass(frozen=True)
class AdamOptions:
    """The options of a parameter group. See :class:`AdamLike`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class AdamLike(BaseOptimizer):
    """An optimizer with Adam's options whose parameters are updated one by one.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update_all(self) -> None:
        for group in self.param_groups:
            options = AdamOptions(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, options)

    @abstractmethod
    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, options: AdamOptions) -> None:
        """Update a parameter."""
