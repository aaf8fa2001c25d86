"""AdamW with bfloat16 moments, and Kahan summation for 16-bit weights."""

from __future__ import annotations

import torch

from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.switches.optimizer.base import AdamLike, AdamOptions

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

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, options: AdamOptions) -> None:
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
        step, (beta1, beta2) = int(state["step"]), options.betas
        gradient = local_part(gradient).float()
        kept_first, kept_second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        first = kept_first.float().lerp_(gradient, 1 - beta1)
        second = kept_second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(options.eps)
        update = torch.div(first, root, out=root).mul_(options.lr / (1 - beta1**step))
        kept_first.copy_(_round_to_bfloat16(first, step))
        kept_second.copy_(_round_to_bfloat16(second, step))
        decay, weight = 1 - options.lr * options.weight_decay, local_part(parameter)
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
