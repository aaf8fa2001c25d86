"""Update rules that torch lacks. They have a step with a closure, and most of them Adam's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rapidformer_templates.engines.recipe import GroupOptions, undecayed
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.blocks import tables_of


class BaseOptimizer(Optimizer):
    """An optimizer whose parameters are updated one by one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    def _update_all(self) -> None:
        """Update all parameters that have a gradient. Called without recording gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter of a group."""
        raise NotImplementedError


class AdamLike(BaseOptimizer):
    """An optimizer with Adam's options.

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


class Lamb(AdamLike):
    """LAMB of You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.

    The update of each parameter is Adam's, with bias correction and decoupled weight decay, scaled
    by ‖weights‖ / ‖update‖. The ratio is 1 unless both norms are above zero.

    ``weight_decay`` is added to the update before the trust ratio is computed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (first / (1 - beta1**step)).div_(root).add_(parameter, alpha=group["weight_decay"])
        weight_norm, update_norm = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        parameter.sub_(update.mul_(ratio * group["lr"]))


class Lion(BaseOptimizer):
    """Lion of Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.

    Each element moves by the learning rate, up or down. The direction is the sign of a mix of momentum and gradient.
    The momentum is the only state. Each element is updated separately, so shards of parameters give the same result as
    whole ones.

    The paper uses a learning rate that is 3 to 10 times smaller than that of AdamW, and a weight decay that is larger
    by the same factor.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: share of the momentum in the mix, and decay of the momentum.
        weight_decay: decoupled from the gradient.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2), state = group["lr"], group["betas"], self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        weight, gradient, momentum = map(local_part, (parameter, gradient, state["exp_avg"]))
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr)
        momentum.lerp_(gradient, 1 - beta2)


TURN = 40503
"""65536 divided by the golden ratio.

Its multiples spread evenly over the 65536 positions between two bfloat16 numbers.
"""


class AnyPrecisionAdamW(AdamLike):
    """AdamW whose two moments are stored in bfloat16. They take 4 bytes per parameter instead of 8.

    Every update is computed in fp32 and rounded once. A second moment that decays by a thousandth per step
    would never change if it were rounded to the nearest value, because bfloat16 values are a 256th apart. So the
    threshold between rounding down and up moves from step to step. Over many steps, the errors cancel without
    random numbers: each run, and each worker of a run, rounds in the same way.

    16-bit weights keep their rounding error in a third number (Kahan, "Further Remarks on Reducing
    Truncation Errors", 1965), which takes 2 more bytes, and add it in the next step. Each element is
    updated separately, so shards of parameters give the same result as whole ones.
    """

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            elif state[moment].dtype != torch.bfloat16:  # code that loads a state may give it the type of the parameter
                state[moment] = state[moment].bfloat16()
        if parameter.itemsize == 2 and "compensation" not in state:
            state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        gradient = local_part(gradient).float()
        kept_first, kept_second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        first = kept_first.float().lerp_(gradient, 1 - beta1)
        second = kept_second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = torch.div(first, root, out=root).mul_(group["lr"] / (1 - beta1**step))
        kept_first.copy_(_round_to_bfloat16(first, step))
        kept_second.copy_(_round_to_bfloat16(second, step))
        decay, weight = 1 - group["lr"] * group["weight_decay"], local_part(parameter)
        if "compensation" not in state:
            weight.mul_(decay).sub_(update)
            return
        compensation = local_part(state["compensation"])
        exact = weight.float().add_(compensation).mul_(decay).sub_(update)
        weight.copy_(exact)
        compensation.copy_(exact.sub_(weight))


def _round_to_bfloat16(values: torch.Tensor, step: int) -> torch.Tensor:
    """Round fp32 values to one of the two adjacent bfloat16 numbers. The values are overwritten."""
    bits = values.view(torch.int32)
    bits.add_(step * TURN % 65536).bitwise_and_(-65536)
    return values


class Muon(BaseOptimizer):
    """Muon (Jordan et al., 2024), whose updates are orthogonalized momentum, combined with AdamW.

    The update of an ``m × n`` matrix is scaled by ``0.2 √max(m, n)``. This makes it as large as AdamW's
    (Liu et al., "Muon is Scalable for LLM Training", 2025), so AdamW's learning rate and weight decay
    can be kept. torch's own class computes it, with five Newton-Schulz iterations in bfloat16.

    A group with ``rule`` "muon" (the default) contains matrices. AdamW updates groups with ``rule`` "adamw".

    Args:
        params: parameters or groups of them.
        lr: learning rate of both.
        weight_decay: decoupled weight decay of both.
        momentum: Muon's Nesterov momentum.
        betas, eps: options of AdamW.

    Raises:
        ValueError: a group for Muon has a parameter that is not a matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rule": "muon"})
        for parameter in (p for group in self.param_groups if group["rule"] == "muon" for p in group["params"]):
            if parameter.ndim != 2:
                raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(parameter.shape)}")
        nothing = [nn.Parameter(torch.empty(1, 1))]
        self._rules: dict[str, Optimizer] = {
            "muon": torch.optim.Muon(nothing, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(nothing, lr, betas, eps, weight_decay),
        }
        for group in self.param_groups:
            for name, value in self._rules[group["rule"]].defaults.items():
                group.setdefault(name, value)

    def _update_all(self) -> None:
        for name, rule in self._rules.items():
            # Both optimizers use our groups and our state, regardless of who has set them.
            rule.param_groups = [group for group in self.param_groups if group["rule"] == name]
            rule.state = self.state
            rule.step()


def groups_of(model: nn.Module) -> GroupOptions:
    """Return the group options of a model, which must be as it was built."""
    return rule_by_shape(tables_of(model))


def rule_by_shape(tables: frozenset[str]) -> GroupOptions:
    """Return group options that assign everything except matrices to AdamW, and the named tables too."""

    def options(name: str, parameter: nn.Parameter) -> Mapping[str, object]:
        rule = "muon" if parameter.ndim == 2 and name not in tables else "adamw"
        return {**undecayed(name, parameter), "rule": rule}

    return options
