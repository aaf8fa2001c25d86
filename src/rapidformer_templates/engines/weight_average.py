"""An exponential moving average of the weights, beside the optimizer's state of each and divided as that is.

What an optimizer updates is averaged where it lies, shard by shard, right after each of its steps; checkpoints hold the
average as they hold moments, and take it into any other layout. A step that is skipped changes nothing.
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
"""Of an optimizer's state of a parameter: the average of its values."""


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Average after each step: ``decay`` of the average so far and the rest of the new weight; first the first weight.

    As ``torch.optim.swa_utils.AveragedModel`` does with ``get_ema_multi_avg_fn``.
    """
    updates = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer

    @torch.no_grad()
    def average(stepped: Optimizer, *unused: Any) -> None:
        skipped = getattr(stepped, "found_inf", None)  # of a fused update that nobody has read yet
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
    """The entry of a checkpoint's optimizer state that holds the average of a parameter."""
    return f"{name}/{KEY}"


class WithoutAverages:
    """A checkpoint as a run without averages has it: one that is not kept up would be wrong when it is next asked for.

    Args:
        reader: of the checkpoint.
    """

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.read = reader.read

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes, see :class:`StateReader`."""
        named = self._reader.names(kind).items()
        return {name: shape for name, shape in named if kind != "optimizer" or not name.endswith(f"/{KEY}")}


@torch.no_grad()
def exchange(values: torch.Tensor, state: dict[str, Any]) -> None:
    """Put the average in the place of what it is the average of, and that into its own; twice is nothing."""
    if KEY in state:
        here, there = local_part(values.detach()), local_part(state[KEY])
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)
