"""CPU offload: the optimizer and what it keeps in host memory, beside a model on another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rapidformer_templates.engines.recipe import OptimizerSpec


def lies_in_host_memory(device: torch.device) -> bool:
    """Whether parameters and optimizer state are in host memory without being moved."""
    return device.type == "cpu"


class HostOptimizer(Optimizer):
    """Updates copies of the parameters in host memory, where all of its state is.

    A step copies the gradients to the host, updates there and copies the new weights back. Copies
    have the type of their parameters, so that an update is the same as on the device. To the rest
    it is an optimizer over the device's parameters: groups and state are theirs.

    Host memory a trained parameter: its weight, its gradient and the optimizer's state, 16 bytes for
    AdamW in fp32; weights and gradients page-locked, because a GPU copies from and to such memory alone.

    Attributes:
        inner: the optimizer that the recipe builds, over the copies.
    """

    def __init__(
        self,
        recipe: OptimizerSpec,
        parameters: Sequence[tuple[str, nn.Parameter]],
        differing: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._copies = {parameter: nn.Parameter(_on_host(parameter)) for _, parameter in parameters}
        self._gradients = {parameter: _on_host(parameter) for _, parameter in parameters}
        # Changes in place to a parameter, as autograd counts them, when its copy was last equal to it. None
        # yet: DDP may send the weights of rank 0 after this, and a copy is made at the first step all the same.
        self._versions: dict[nn.Parameter, int] = {}
        self.inner = recipe.build([(name, self._copies[parameter]) for name, parameter in parameters], differing)
        of_copy = {copy: parameter for parameter, copy in self._copies.items()}
        groups = [{**group, "params": [of_copy[c] for c in group["params"]]} for group in self.inner.param_groups]
        super().__init__(groups, self.inner.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None, "engines call no closure"
        moving = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in moving:
            self._fetch(parameter)
        if not lies_in_host_memory(moving[0].device):
            torch.accelerator.synchronize()  # the copies to the host run behind
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            own.update(_options(group))
        self.inner.step()
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update(_options(own))  # some keep a count or an estimate there
        self._show_state()
        for parameter in moving:
            if parameter.grad is not None:
                # The next step writes into the copy only after it has waited for the device.
                parameter.copy_(self._copies[parameter], non_blocking=True)
            self._versions[parameter] = parameter._version

    def _fetch(self, parameter: nn.Parameter) -> None:
        """Bring a gradient, and a weight that something else has set (a checkpoint), to the host."""
        copy = self._copies[parameter]
        if self._versions.get(parameter) != parameter._version:
            copy.copy_(parameter, non_blocking=True)
        if parameter.grad is None:
            copy.grad = None
            return
        copy.grad = self._gradients[parameter]
        copy.grad.copy_(parameter.grad, non_blocking=True)

    def _show_state(self) -> None:
        """Present the state, which lies in host memory, under the device's parameters."""
        for parameter, copy in self._copies.items():
            if copy in self.inner.state:
                self.state[parameter] = self.inner.state[copy]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; the state goes to the host's copies, whose order is the same."""
        self.inner.load_state_dict(state_dict)
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update(_options(own))
        self.state.clear()
        self._show_state()


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor, page-locked if the tensor lies elsewhere."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=not lies_in_host_memory(like.device))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
