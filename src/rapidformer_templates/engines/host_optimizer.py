"""CPU offload: the optimizer and its state are in host memory, the model is on another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rapidformer_templates.engines.recipe import OptimizerSpec


def is_in_host_memory(device: torch.device) -> bool:
    """Whether parameters and optimizer state are in host memory without offload."""
    return device.type == "cpu"


class HostOptimizer(Optimizer):
    """Updates copies of the parameters in host memory, where all of its state is.

    A step copies the gradients to the host, updates there and copies the new weights back. Copies have the type of
    their parameters, so that an update is the same as on the device. For other code this is an optimizer of the
    device's parameters: its groups and state refer to them.

    Host memory per trained parameter: its weight, its gradient and the optimizer state, 16 bytes for AdamW in fp32.
    Weights and gradients are in page-locked memory, because a GPU copies only from and to such memory.

    Attributes:
        inner: the optimizer that the recipe builds, over the copies.
    """

    def __init__(
        self,
        recipe: OptimizerSpec,
        parameters: Sequence[tuple[str, nn.Parameter]],
        differing: Mapping[str, Mapping[str, object]],
    ) -> None:
        self._copies = {parameter: nn.Parameter(_on_host(parameter)) for _, parameter in parameters}
        self._gradients = {parameter: _on_host(parameter) for _, parameter in parameters}
        # In-place modification counts of the parameters (from autograd) when their copies were last equal. Empty at
        # first: DDP may broadcast the weights of rank 0 later, and the first step makes the copies anyway.
        self._versions: dict[nn.Parameter, int] = {}
        self.inner = recipe.build([(name, self._copies[parameter]) for name, parameter in parameters], differing)
        of_copy = {copy: parameter for parameter, copy in self._copies.items()}
        groups = [{**group, "params": [of_copy[c] for c in group["params"]]} for group in self.inner.param_groups]
        super().__init__(groups, self.inner.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None, "engines do not call a closure"
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            copy = self._copies[parameter]
            if self._versions.get(parameter) != parameter._version:  # something else has changed it: a checkpoint
                copy.copy_(parameter, non_blocking=True)
            copy.grad = None
            if parameter.grad is not None:
                copy.grad = self._gradients[parameter]
                copy.grad.copy_(parameter.grad, non_blocking=True)
        if not is_in_host_memory(parameters[0].device):
            torch.accelerator.synchronize()  # the copies to the host are asynchronous
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            inner.update(_options(group))
        self.inner.step()
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update(_options(inner))  # some optimizers keep a count or an estimate in their groups
        self._expose_state()
        for parameter in parameters:
            if parameter.grad is not None:
                # The next step writes to the copy only after it has waited for the device.
                parameter.copy_(self._copies[parameter], non_blocking=True)
            self._versions[parameter] = parameter._version

    def _expose_state(self) -> None:
        """Make the state in host memory accessible under the device's parameters."""
        for parameter, copy in self._copies.items():
            if copy in self.inner.state:
                self.state[parameter] = self.inner.state[copy]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the host optimizer, whose parameters have the same order."""
        self.inner.load_state_dict(state_dict)
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update(_options(inner))
        self.state.clear()
        self._expose_state()


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor, page-locked if the tensor is on another device."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=not is_in_host_memory(like.device))


def _options(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}
