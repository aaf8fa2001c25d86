"""Adapters for matrices that are not layers: stacks of experts, and the weights of routers.

peft supports them with ``ParamWrapper``, which adds the product of the adapter to the full matrix before each forward.
Here the tokens of an expert go through its two small matrices instead, as in a linear layer with an adapter. So no
second copy of the stack is allocated.
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
    """One of the two matrices of an adapter. Its forward returns the weight.

    So an engine that shards or gathers the weights of a module also handles this one.
    """

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        # Return a view: ZeRO-3 frees the storage of the parameter itself after this forward.
        return self.weight.view_as(self.weight)


class StackAdapter(ParamWrapper):
    """An adapter for one of the stacks [N, …] of an experts module. The module itself asks for its factors."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    def factors(self) -> Factors | None:
        """Return the two matrices for each expert, or None while adapters are disabled."""
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
    """An adapter for the weight of a module that multiplies by it in its own way, such as a router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    def product(self) -> torch.Tensor | None:
        """Return what the adapter adds to the weight, or None while adapters are disabled."""
        if self.disable_adapters:
            return None
        (name,) = self.active_adapters
        down, up = self.lora_A[name](), self.lora_B[name]()
        with torch.autocast(down.device.type, enabled=False):
            return self.scaling[name] * up @ down


class OnAdaptedWeight:
    """The forward of a module with an adapter. While it runs, the module's weight includes the adapter's product.

    It wraps the module's forward and not the adapter's. So it sees the gathered weight, or the local part of it.
    """

    def __init__(self, module: nn.Module, adapter: MatrixAdapter) -> None:
        functools.update_wrapper(self, module.forward)
        self.module, self.forward = module, module.forward
        self.name, self.product = adapter.parameter_name, adapter.product

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        product = self.product()
        if product is None:
            return self.forward(*args, **kwargs)
        # No local name for __dict__, because of graph breaks: see OnLocalParameters in layout/tensor_layers.py.
        before: dict[str, Any] = self.module._parameters
        self.module.__dict__["_parameters"] = {**before, self.name: before[self.name] + product}
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.module.__dict__["_parameters"] = before


def matrix_adapters(model: nn.Module) -> Iterator[tuple[str, ParamWrapper]]:
    """Yield the adapters of matrices that are not layers, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            yield name, module


def install(model: nn.Module, adapter: str) -> None:
    """Turn peft's wrappers of matrices into instances of the classes above."""
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
