"""Muon for the matrices of a model, and AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rapidformer_templates.engines.recipe import GroupOptions, undecayed
from rapidformer_templates.models.blocks import canonical_name


class Muon(Optimizer):
    """Muon (Jordan et al., 2024), whose steps are orthogonalized momentum, with AdamW beside it.

    A step of a matrix of ``m × n`` is scaled by ``0.2 √max(m, n)``, which makes it as long as one of
    AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025): learning rate and weight decay of
    AdamW can be kept. torch's own class makes it; five Newton-Schulz iterations in bfloat16.

    A group with ``rule`` "muon" (the default) has matrices; one with ``rule`` "adamw" is AdamW's.

    Args:
        params: parameters or groups of them.
        lr: learning rate of both.
        weight_decay: decoupled, of both.
        momentum: of Muon, with Nesterov's look ahead.
        betas, eps: of AdamW.

    Raises:
        ValueError: a group for Muon has what is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, rule in self._rules.items():
            # Each works on the groups and the state that are ours, whoever has put them there.
            rule.param_groups = [group for group in self.param_groups if group["rule"] == name]
            rule.state = self.state
            rule.step()
        return loss


def tables_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are read by row or column: embeddings, and the head that scores the tokens."""
    head_of: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = head_of()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    ids = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    return frozenset(canonical_name(name) for name, parameter in model.named_parameters() if id(parameter) in ids)


def groups_of(model: nn.Module) -> GroupOptions:
    """The group options of a model as it was built."""
    return rule_by_shape(tables_of(model))


def rule_by_shape(tables: frozenset[str]) -> GroupOptions:
    """Group options that leave all but matrices to AdamW, and the named tables too."""

    def options(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        rule = "muon" if parameter.ndim == 2 and name not in tables else "adamw"
        return {**undecayed(name, parameter), "rule": rule}

    return options
