"""Muon for the matrices of a model, and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rapidformer_templates.engines.recipe import GroupOptions, undecayed
from rapidformer_templates.models.blocks import tables_of
from rapidformer_templates.switches.optimizer.base import BaseOptimizer


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
