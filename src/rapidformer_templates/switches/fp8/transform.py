"""Transform that multiplies in fp8 in the linear layers of the blocks, and the receipt of the products that ran."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.engines.assembly import Assembly, Building, GatheredInFewerBits
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import name_without_adapters
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.switches.fp8.declaration import KINDS, Fp8Flags
from rapidformer_templates.system.terminal import say

ALIGNED = 16
"""The kernels read rows of a multiple of 16 elements."""

NOT_DENSE = re.compile(r"(^|\.)(router|gate|gating|lora_\w+)(\.|$)")
"""Names of routers and adapters. Their products are small, and a router's must be accurate."""

FILTERED = "--fp8-filter"


class Fp8Product:
    """The forward of a linear layer that multiplies in fp8. The weight stays as it is, under its name.

    Args:
        layer: an ``nn.Linear`` or a ``Conv1D``.
        config: torchao's recipe.
        kernels: torchao's settings of the three products.
    """

    def __init__(self, layer: nn.Linear | Conv1D, config: Float8LinearConfig, kernels: LinearMMConfig) -> None:
        functools.update_wrapper(self, layer.forward)
        self.module = layer
        self.is_transposed = isinstance(layer, nn.Linear)
        self.config, self.kernels = config, kernels

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product with a weight, or with a part of it, as the layer stores it."""
        device = x.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        matrix = weight.t() if self.is_transposed else weight
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(x.to(kind), matrix, self.kernels, self.config)
        return result

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result, bias = self.multiply(x, self.module.weight), self.module.bias
        return result if bias is None else result + bias.to(result.dtype)


@dataclass(frozen=True)
class Fp8Layers:
    """The linear layers of all blocks.

    Attributes:
        converted: number of those that multiply in fp8.
        left_out: numbers of the others, by reason.
    """

    converted: int
    left_out: Mapping[str, int]


def multiply_in_fp8(assembly: Assembly, building: Building[Fp8Flags]) -> None:
    """Replace the forward of the linear layers in the blocks. Other matrices stay in bf16.

    Raises:
        ModelError: the model has no repeated blocks, none of their layers can multiply in fp8, or ``--fp8-filter``
            matches none.
    """
    options, workers = building.options, building.workers
    layers = {
        canonical_name(f"{name}.{inner}"): layer
        for name, block in assembly.require_blocks("fp8", "--fp8-recipe").items()
        for inner, layer in block.named_modules()
        if type(layer) in (nn.Linear, Conv1D)
    }
    reasons = {name: _reason(name, layer, options, building.plan.sizes.tensor) for name, layer in layers.items()}
    everywhere: dict[str, str | None] = {}
    for of_worker in workers.gather(reasons) if building.has_values else [reasons]:
        everywhere |= of_worker
    converted = [name for name, reason in everywhere.items() if reason is None]
    left_out = Counter(reason for reason in everywhere.values() if reason)
    if not converted or (options.fp8_filter and not left_out[FILTERED]):
        lacking = f"no layer's name contains {options.fp8_filter}" if converted else "no layer can multiply in fp8"
        hint = "; ".join(f"{count} × {reason}" for reason, count in left_out.items()) or "the blocks have no nn.Linear"
        where = "--fp8-filter" if converted else "--fp8-recipe"
        raise ModelError(lacking, where=where, hint=f"names are {', '.join(layers)}" if converted else hint)
    config = replace(Float8LinearConfig.from_recipe_name(str(options.fp8_recipe)), emulate=options.fp8_emulate)
    kernels, padding = _kernels(config), _kernels(replace(config, pad_inner_dim=True))
    # A weight's gradient is a sum over tokens, whose number may be any.
    kernels = LinearMMConfig(kernels.output, kernels.grad_input, padding.grad_weight)
    for name, layer in layers.items():
        if reasons[name] is None:
            layer.forward = Fp8Product(layer, config, kernels)
    if options.fp8_all_gather:
        sender = partial(WeightWithDynamicFloat8CastTensor, linear_mm_config=kernels, dtype=e4m3_dtype)
        in_fp8 = frozenset(layer for name, layer in layers.items() if reasons[name] is None)
        assembly.record(GatheredInFewerBits(in_fp8, sender, find_scales))
    assembly.record(Fp8Layers(len(converted), dict(left_out)))
    if building.has_values:
        say(workers, f"note       fp8: {len(converted)} layers multiply in fp8, {left_out.total()} in bf16")


def _kernels(config: Float8LinearConfig) -> LinearMMConfig:
    """Let torchao derive the settings of its kernels, and apply its corrections of torch's compiler."""
    layer: Any = convert_to_float8_training(nn.Linear(ALIGNED, ALIGNED, device="meta"), config=config)
    settings: LinearMMConfig = layer.linear_mm_config
    return settings


@torch.no_grad()
def find_scales(weights: Sequence[Any]) -> None:
    """Find the scales of all weights with one exchange. Otherwise, each weight needs one when it is gathered.

    Args:
        weights: this worker's rows of each weight, as torchao's :class:`WeightWithDynamicFloat8CastTensor`.
    """
    if not weights:
        return
    largest = torch.stack(torch._foreach_norm([weight._tensor for weight in weights], math.inf))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scales = amax_to_scale(largest, e4m3_dtype)
    for weight, scale in zip(weights, scales, strict=True):
        weight._precomputed_scale = scale


def _reason(name: str, layer: nn.Module, options: Fp8Flags, tensor: int) -> str | None:
    """Return why a layer stays in bf16, or None."""
    if options.fp8_filter and re.search(options.fp8_filter, name_without_adapters(name)):
        return FILTERED
    if NOT_DENSE.search(name):
        return "a router or an adapter"
    weight: Any = layer.weight
    if any(size % (ALIGNED * tensor) for size in weight.shape):
        parts = f" in {tensor} parts" if tensor > 1 else ""
        return f"{' × '.join(map(str, weight.shape))}{parts} is not in multiples of {ALIGNED}"
    return None


ROLES = {
    (GemmInputRole.INPUT, GemmInputRole.WEIGHT): "forward",
    (GemmInputRole.GRAD_OUTPUT, GemmInputRole.WEIGHT): "input_gradient",
    (GemmInputRole.GRAD_OUTPUT, GemmInputRole.INPUT): "weight_gradient",
}


class Fp8Products(Receipt):
    """Reports ``fp8_products`` (of the first step, by kind) and ``fp8_layers``.

    A compiled graph counts once: when it is traced, and not when blocks run it.
    """

    def __init__(self) -> None:
        self._products = dict.fromkeys(KINDS, 0)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        multiply: Callable[..., torch.Tensor] = FLOAT8_OPS_TABLE[torch.ops.aten.mm.default]

        def counted(operator: object, operands: tuple[Any, Any], options: object = None) -> torch.Tensor:
            one, other = operands
            if not is_fake(one) or get_proxy_mode() is not None:  # else the compiler only looks for shapes
                self._products[ROLES[one._gemm_input_role, other._gemm_input_role]] += 1
            return multiply(operator, operands, options)

        with patch.dict(FLOAT8_OPS_TABLE, {torch.ops.aten.mm.default: counted}):
            yield

    def after_step(self, engine: Engine) -> dict[str, object]:
        layers = engine.assembly.find(Fp8Layers)
        return {"fp8_products": self._products, "fp8_layers": layers and {"fp8": layers.converted, **layers.left_out}}
