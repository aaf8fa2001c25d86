"""The layers of a model with adapters: adapters of matrices that are not layers, and linear layers in 8 or 4 bits.

Matrices that are not layers are stacks of experts, and the weights of routers. peft supports them with
``ParamWrapper``, which adds the product of the adapter to the full matrix before each forward. Here the tokens of an
expert go through its two small matrices instead, as in a linear layer with an adapter. So no second copy of the stack
is allocated.

A quantized layer dequantizes its frozen weight to the compute type, in the forward and in the backward. The stored
weight is a single uint8 tensor, so an engine that converts a model's types leaves it alone. FSDP shards these bytes in
equal parts, also inside a block or a scale, because it gathers all of them before a forward or backward reads them.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from peft.tuners.lora import ParamWrapper
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.models.adapters import Factors, reader_of, set_stack_adapter, set_stack_reader
from rapidformer_templates.models.blocks import note_shape

BLOCK = 64
"""Number of values that share a scale in the 4-bit formats (Dettmers et al., *QLoRA*, 2023)."""
SCALE = torch.float32
READ_AS = (torch.float32, torch.bfloat16, torch.float16)
"""Types to which bitsandbytes can dequantize."""


class Factor(nn.Linear):
    """One of the two matrices of an adapter. Its forward returns the weight.

    So an engine that shards or gathers the weights of a module also handles this one.
    """

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        # Return a view: ZeRO-3 frees the storage of the parameter itself after this forward.
        return self.weight.view_as(self.weight)


class StackAdapter(ParamWrapper):
    """An adapter for one of the stacks [N, …] of an experts module. The module itself asks for its factors."""

    def forward(self, *args: object, **kwargs: object) -> Any:
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

    def forward(self, *args: object, **kwargs: object) -> Any:
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

    def __call__(self, *args: object, **kwargs: object) -> object:
        product = self.product()
        if product is None:
            return self.forward(*args, **kwargs)
        # No local name for __dict__, because of graph breaks: see OnLocalParameters in layout/tensor_layers.py.
        before: dict[str, Any] = self.module._parameters
        weight = before[self.name]
        self.module.__dict__["_parameters"] = {**before, self.name: weight + product.to(weight.dtype)}
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.module.__dict__["_parameters"] = before


def install(model: nn.Module, adapter: str) -> None:
    """Turn peft's wrappers of matrices that are not layers into instances of the classes above."""
    for wrapper in [module for module in model.modules() if isinstance(module, ParamWrapper)]:
        for factor in (wrapper.lora_A[adapter], wrapper.lora_B[adapter]):
            factor.__class__ = Factor
        is_stack = wrapper.get_param().dim() == 3
        wrapper.__class__ = StackAdapter if is_stack else MatrixAdapter
        layer: Any = wrapper
        base = layer.get_base_layer()
        if is_stack:
            set_stack_adapter(base, layer.parameter_name, layer)
        else:
            base.forward = OnAdaptedWeight(base, layer)


@dataclass(frozen=True)
class Coding(ABC):
    """How a weight is stored in bytes: first the scales of all blocks of values, then the codes.

    Attributes:
        shape: the shape of the weight.
        bits: number of bits of a code.
    """

    shape: tuple[int, int]
    bits: ClassVar[int] = 4

    @property
    def block(self) -> int:
        """Number of values in a block."""
        return BLOCK

    @property
    def blocks(self) -> int:
        """Number of blocks. The last one is padded with zeros."""
        return math.ceil(math.prod(self.shape) / self.block)

    @property
    def size(self) -> int:
        """Total number of bytes."""
        return self.blocks * (SCALE.itemsize + self.block * self.bits // 8)

    @abstractmethod
    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scales, codes) of fp32 values of shape (blocks, block)."""

    @abstractmethod
    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Return the dequantized values of all blocks."""

    def write(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a weight and return its bytes."""
        flat = weight.detach().float().flatten()
        missing = self.blocks * self.block - len(flat)
        filled = functional.pad(flat, (0, missing)) if missing else flat  # padding would be a copy
        scales, codes = self.encode(filled.view(self.blocks, self.block))
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in (scales.to(SCALE), codes)])

    def read(self, stored: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Dequantize a weight from its bytes to a floating-point type."""
        border = self.blocks * SCALE.itemsize
        numbers = self.decode(stored[:border].view(SCALE), stored[border:], kind)
        return numbers.flatten()[: math.prod(self.shape)].view(self.shape)


class EightBits(Coding):
    """Integers from -127 to 127 with one scale per row, the same codes as torchao's symmetric ``PerRow``."""

    bits = 8

    @property
    def block(self) -> int:
        return self.shape[1]

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _integers(blocks, -127, 127)

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        return _numbers(codes.view(torch.int8).view(self.blocks, -1), scales, kind)


class FourBits(Coding):
    """Integers from -8 to 7, two per byte, with one scale per 64 values."""

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, codes = _integers(blocks, -8, 7)
        return scales, (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        pairs = codes.view(torch.int8).view(self.blocks, -1)
        # A right shift keeps the sign.
        return _numbers(torch.stack([pairs << 4 >> 4, pairs >> 4], -1).flatten(1), scales, kind)


class NormalFloat(Coding):
    """bitsandbytes' NF4: the 16 quantiles of a normal distribution, two per byte, with one scale per 64 values."""

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(blocks, blocksize=BLOCK, quant_type="nf4")
        return state.absmax, codes

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        read_as = kind if kind in READ_AS else torch.float32
        # Pass all values as one row. bitsandbytes' CPU kernel (0.50.2) reads wrong values if the length of a row is not
        # a multiple of the block size.
        row = torch.Size((1, self.blocks * BLOCK))
        state = QuantState(scales, shape=row, dtype=read_as, blocksize=BLOCK, quant_type="nf4")
        return dequantize_4bit(codes, state).to(kind)


def _integers(blocks: torch.Tensor, lowest: int, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1) / ((highest - lowest) / 2)
    scales = scales.clamp(min=torch.finfo(SCALE).eps)
    return scales, (blocks * (1.0 / scales[:, None])).round_().clamp_(lowest, highest).to(torch.int8)


def _numbers(codes: torch.Tensor, scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return codes.to(SCALE).mul_(scales[:, None]).to(kind)


CODINGS: dict[str, type[Coding]] = {"int8": EightBits, "int4": FourBits, "nf4": NormalFloat}
"""Codings by the value of ``--quantize-base``."""


class _Product(torch.autograd.Function):
    """A linear layer that saves the quantized bytes for the backward, and not the dequantized weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, stored: torch.Tensor, bias: torch.Tensor | None, coding: Coding
    ) -> torch.Tensor:
        ctx.save_for_backward(stored)
        ctx.coding = coding
        return functional.linear(x, coding.read(stored, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (stored,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ ctx.coding.read(stored, gradient.dtype), None, None, None


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a quantized weight. It computes the same as a layer with the dequantized weight.

    Attributes:
        weight: the quantized bytes.
        bias: the bias of the original layer.
    """

    def __init__(self, layer: nn.Linear | Conv1D, coding: str, *, has_values: bool = True) -> None:
        """Quantize a linear layer.

        ``coding`` is a key of ``CODINGS``. Without values, allocate the same number of bytes.
        """
        super().__init__()
        matrix: torch.Tensor = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        outputs, inputs = matrix.shape
        self.out_features, self.in_features = outputs, inputs
        self.coding = CODINGS[coding]((outputs, inputs))
        stored = self.coding.write(matrix) if has_values else matrix.new_empty(self.coding.size, dtype=torch.uint8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        note_shape(self.weight, self.coding.shape)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = self.bias if self.bias is None else self.bias.to(kind)
        return _Product.apply(x.to(kind), self.weight, bias, self.coding)


def quantize_stack(experts: Any, name: str, coding: str, *, has_values: bool) -> None:
    """Replace one of the stacks of an experts module with its quantized bytes.

    Each row of a matrix contains the weights of one output, as in a linear layer.
    """
    stack: torch.Tensor = getattr(experts, name).detach()
    shape = tuple(stack.shape)
    rows = (stack.transpose(1, 2) if experts.is_transposed else stack).flatten(0, 1)
    of_rows = CODINGS[coding]((rows.shape[0], rows.shape[1]))

    def read(stored: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Dequantize the bytes to [N, in, out]."""
        return of_rows.read(stored, kind).unflatten(0, (shape[0], -1)).transpose(1, 2)

    stored = of_rows.write(rows) if has_values else stack.new_empty(of_rows.size, dtype=torch.uint8)
    parameter = nn.Parameter(stored, requires_grad=False)
    note_shape(parameter, shape)
    experts.register_parameter(name, parameter)
    set_stack_reader(experts, name, read)


def is_quantized(layer: Any) -> bool:
    """Return whether the weight under an adapter is quantized."""
    name = getattr(layer, "parameter_name", None)
    base = layer.get_base_layer()
    return isinstance(base, QuantizedLinear) if name is None else reader_of(base, name) is not None
