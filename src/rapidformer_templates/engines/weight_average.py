"""An exponential moving average of the weights, part of the optimizer state and sharded like it.

Each shard of a parameter is averaged on its device right after each optimizer step, also if this step did not update
the parameter. Checkpoints store the average like the moments, so that any other layout can load it. A skipped step
changes nothing.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from rapidformer_templates.engines.host_optimizer import HostOptimizer
from rapidformer_templates.engines.shards import StateReader, local_part

KEY = "weight_average"
"""Key of the average in the optimizer state of a parameter."""


class WeightAverage:
    """Averages the weights after each step: ``decay`` times the average plus the rest of the new weight.

    The average starts with the weight after the first step, like ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn``. A step may call the optimizer several times, each time for some parameters. So the engine
    reports the end of a step, and only then the parameters are averaged that this step did not update.

    Args:
        optimizer: the optimizer that keeps the averages in its state.
        decay: fraction of the average that remains after a step.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
        self._decay = decay
        self._is_first_step: bool | None = None
        self._updated: set[torch.Tensor] = set()
        self._before_first_update: dict[torch.Tensor, torch.Tensor] = {}
        self._optimizer.register_step_pre_hook(self._before_call)
        self._optimizer.register_step_post_hook(self._after_call)

    def _before_call(self, optimizer: Optimizer, *unused: object) -> None:
        """Keep the weights of parameters that a later step than the first updates for the first time."""
        if self._is_first_step is None:
            self._is_first_step = not any(KEY in state for state in optimizer.state.values())
        if not self._is_first_step:
            for parameter in _parameters_with_gradient(optimizer):
                if KEY not in optimizer.state.get(parameter, {}):
                    self._before_first_update[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def _after_call(self, optimizer: Optimizer, *unused: object) -> None:
        skipped = getattr(optimizer, "found_inf", None)  # flag of a fused update, not read by the host
        for parameter in _parameters_with_gradient(optimizer):
            state = optimizer.state[parameter]
            if parameter in self._before_first_update:
                state[KEY] = self._before_first_update.pop(parameter)
            self._average(parameter, state, skipped)
            self._updated.add(parameter)

    @torch.no_grad()
    def end_step(self, skipped: bool | torch.Tensor) -> None:
        """Average the parameters that this step did not update.

        A parameter that no step has updated yet has no state. It equals its average.

        Args:
            skipped: whether the update was skipped (fp16). A tensor is not read by the host.
        """
        if skipped is True:
            return
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            state = self._optimizer.state.get(parameter)
            if state and parameter not in self._updated:
                self._average(parameter, state, skipped if isinstance(skipped, torch.Tensor) else None)
        self._updated.clear()
        self._is_first_step = False

    def _average(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], skipped: torch.Tensor | None) -> None:
        if KEY not in state:
            state[KEY] = parameter.detach().clone()
            return
        average, new = local_part(state[KEY]), local_part(parameter)
        share = 1 - self._decay
        average.lerp_(new, share if skipped is None else share * (1 - skipped.to(average.dtype)))


def _parameters_with_gradient(optimizer: Optimizer) -> list[torch.Tensor]:
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
def exchange(values: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    """Swap the values with their average. A second call swaps them back."""
    if KEY in state:
        weight, average = local_part(values.detach()), local_part(state[KEY])
        old_weight = weight.clone()
        weight.copy_(average)
        average.copy_(old_weight)
