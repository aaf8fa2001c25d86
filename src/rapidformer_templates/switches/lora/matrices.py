"""Adapters beside matrices that are no layers: stacks of experts, and the weights of routers.

peft puts them there (``ParamWrapper``) and adds their product to the whole matrix before each forward. Here the tokens
of an expert go through its two small matrices, as beside a linear layer, so that no second stack is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from torch import nn

from rapidformer_templates.models.adapters import Factors, set_stack_adapter
from rapidformer_templates.models.blocks import shape_of


class Factor(nn.Linear):
    """One of the two matrices. Its forward gives it: whatever divides or gathers a module's weight then does so."""

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        # A view: ZeRO-3 empties the parameter itself behind this forward.
        return self.weight.view_as(self.weight)


class StackAdapter(ParamWrapper):
    """Beside one of the stacks [N, …] of a module of experts, which asks for what stands beside it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    def factors(self) -> Factors | None:
        """None while adapters are off."""
        if self.disable_adapters:
            return None
        (name,) = self.active_adapters
        down, up = self.lora_A[name](), self.lora_B[name]()  # [N · rank, in], [out, rank · N]
        return Factors(
            down.unflatten(0, (self.num_experts, -1)).transpose(1, 2),
            up.unflatten(1, (-1, self.num_experts)).permute(2, 1, 0),
            self.scaling[name],
        )


class MatrixAdapter(ParamWrapper):
    """Beside the weight of a module that multiplies by it in its own way, such as a router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    def product(self) -> torch.Tensor | None:
        """What is added to the weight; None while adapters are off."""
        if self.disable_adapters:
            return None
        (name,) = self.active_adapters
        down, up = self.lora_A[name](), self.lora_B[name]()
        with torch.autocast(down.device.type, enabled=False):
            return self.scaling[name] * up @ down


class OnAdaptedWeight:
    """A module's own forward; while it runs, its weight is the one with what an adapter adds.

    It is the module's forward and not the adapter's, so that it finds the weight gathered, or the local part of it.
    """

    def __init__(self, module: nn.Module, adapter: MatrixAdapter) -> None:
        functools.update_wrapper(self, module.forward)
        self.module, self.forward = module, module.forward
        self.name, self.product = adapter.parameter_name, adapter.product

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        product = self.product()
        if product is None:
            return self.forward(*args, **kwargs)
        attributes: dict[str, Any] = self.module.__dict__
        parameters = attributes["_parameters"]
        attributes["_parameters"] = {**parameters, self.name: parameters[self.name] + product}
        try:
            return self.forward(*args, **kwargs)
        finally:
            attributes["_parameters"] = parameters


def matrix_adapters(model: nn.Module) -> Iterator[tuple[str, ParamWrapper]]:
    """Adapters of matrices that are no layers, by name."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            yield name, module


def install(model: nn.Module, adapter: str) -> None:
    """Have peft's wrappers of matrices compute as the classes above do."""
    for _, wrapper in matrix_adapters(model):
        for factor in (wrapper.lora_A[adapter], wrapper.lora_B[adapter]):
            factor.__class__ = Factor
        is_stack = len(shape_of(wrapper.get_param())) == 3
        wrapper.__class__ = StackAdapter if is_stack else MatrixAdapter
        layer: Any = wrapper
        base = layer.get_base_layer()
        if is_stack:
            set_stack_adapter(base, layer.parameter_name, layer)
        else:
            base.forward = OnAdaptedWeight(base, layer)
