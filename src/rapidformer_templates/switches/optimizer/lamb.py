"""LAMB: Adam with a trust ratio for each layer."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from rapidformer_templates.switches.optimizer.base import AdamLike, AdamOptions


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

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, options: AdamOptions) -> None:
        state, (beta1, beta2) = self.state[parameter], options.betas
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(options.eps)
        update = (first / (1 - beta1**step)).div_(root).add_(parameter, alpha=options.weight_decay)
        weight_norm, update_norm = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        parameter.sub_(update.mul_(ratio * options.lr))
