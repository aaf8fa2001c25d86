"""An exponential moving average of the weights, part of the optimizer state and sharded like it.

Each shard of a parameter is averaged on its device right after each optimizer step. Checkpoints store the average like
the moments, so that any other layout can load it. A skipped step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from rapidformer_templates.engines.contract import StateReader
from rapidformer_templates.engines.host_optimizer import HostOptimizer
from rapidformer_templates.engines.pieces import local_part

KEY = "weight_average"
"""Key of the average in the optimizer state of a parameter."""


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Average after each step: ``decay`` times the average plus the rest of the new weight.

    The average starts with the weight after the first step, like ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn``.
    """
    updates = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer

    @torch.no_grad()
    def average(stepped: Optimizer, *unused: Any) -> None:
        skipped = getattr(stepped, "found_inf", None)  # flag of a fused update, not read by the host
        for parameter in _updated(stepped):
            state = stepped.state[parameter]
            if KEY not in state:
                state[KEY] = parameter.detach().clone()
            else:
                own, new = local_part(state[KEY]), local_part(parameter)
                own.lerp_(new, 1 - decay if skipped is None else (1 - decay) * (1 - skipped.to(own.dtype)))

    updates.register_step_post_hook(average)


def _updated(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def average_of(name: str) -> str:
    """Return the optimizer entry of a checkpoint that holds the average of a parameter."""
    return f"{name}/{KEY}"


class WithoutAverages:
    """A checkpoint reader that hides the averages, for a run without them. A stale average would be wrong later.

    Args:
        reader: reader of the checkpoint.
    """

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.read = reader.read

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return names and shapes, see :class:`StateReader`."""
        named = self._reader.names(kind).items()
        return {name: shape for name, shape in named if kind != "optimizer" or not name.endswith(f"/{KEY}")}


@torch.no_grad()
def exchange(values: torch.Tensor, state: dict[str, Any]) -> None:
    """Swap the values with their average. A second call swaps them back."""
    if KEY in state:
        here, there = local_part(values.detach()), local_part(state[KEY])
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)
