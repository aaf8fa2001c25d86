"""Lion: the sign of a momentum."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.switches.optimizer.base import BaseOptimizer


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
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update_all(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                weight, gradient, momentum = map(local_part, (parameter, parameter.grad, state["exp_avg"]))
                direction = momentum.lerp(gradient, 1 - beta1).sign_()
                weight.mul_(1 - lr * decay).sub_(direction, alpha=lr)
                momentum.lerp_(gradient, 1 - beta2)
