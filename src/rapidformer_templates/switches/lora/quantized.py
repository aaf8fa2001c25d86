"""Linear layers with frozen weights in 8 or 4 bits. Forward and backward dequantize them to the compute type.

The stored weight is a single uint8 tensor, so an engine that converts a model's types leaves it alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.models.adapters import reader_of, set_stack_reader
from rapidformer_templates.models.blocks import note_shape

BLOCK = 64
"""Number of values that share a scale in the 4-bit formats (Dettmers et al., *QLoRA*, 2023)."""
SCALE = torch.float32
READ_AS = (torch.float32, torch.bfloat16, torch.float16)
"""Types to which bitsandbytes can dequantize."""


@dataclass(frozen=True)
class Coding(ABC):
    """How a weight is stored in bytes: first the scales of all blocks of values, then the codes.

    Attributes:
        shape: the shape of the weight.
    """

    shape: tuple[int, int]

    @property
    def block(self) -> int:
        """Number of values in a block."""
        return BLOCK

    @property
    def blocks(self) -> int:
        """Number of blocks. The last one is padded with zeros."""
        return math.ceil(math.prod(self.shape) / self.block)

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """Number of bytes that the codes take."""

    @property
    def size(self) -> int:
        """Total number of bytes."""
        return self.blocks * SCALE.itemsize + self.code_bytes

    @abstractmethod
    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scales, codes) of fp32 values of shape (blocks, block)."""

    @abstractmethod
    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Return the dequantized values of all blocks."""

    def write(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a weight and return its bytes."""
        flat = weight.detach().float().flatten()
        filled = functional.pad(flat, (0, self.blocks * self.block - len(flat)))
        scales, codes = self.encode(filled.view(self.blocks, self.block))
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in (scales.to(SCALE), codes)])

    def read(self, stored: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Dequantize a weight from its bytes to a floating-point type."""
        border = self.blocks * SCALE.itemsize
        numbers = self.decode(stored[:border].view(SCALE), stored[border:], kind)
        return numbers.flatten()[: math.prod(self.shape)].view(self.shape)


class EightBits(Coding):
    """Integers from -127 to 127 with one scale per row, the same codes as torchao's symmetric ``PerRow``."""

    @property
    def block(self) -> int:
        return self.shape[1]

    @property
    def code_bytes(self) -> int:
        return math.prod(self.shape)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _integers(blocks, -127, 127)

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        return _numbers(codes.view(torch.int8).view(self.blocks, -1), scales, kind)


class FourBits(Coding):
    """Integers from -8 to 7, two per byte, with one scale per 64 values."""

    @property
    def code_bytes(self) -> int:
        return self.blocks * BLOCK // 2

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, codes = _integers(blocks, -8, 7)
        return scales, (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        pairs = codes.view(torch.int8).view(self.blocks, -1)
        # A right shift keeps the sign.
        return _numbers(torch.stack([pairs << 4 >> 4, pairs >> 4], -1).flatten(1), scales, kind)


class NormalFloat(Coding):
    """bitsandbytes' NF4: the 16 quantiles of a normal distribution, two per byte, with one scale per 64 values."""

    @property
    def code_bytes(self) -> int:
        return self.blocks * BLOCK // 2

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(blocks, blocksize=BLOCK, quant_type="nf4")
        return state.absmax, codes

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        read_as = kind if kind in READ_AS else torch.float32
        # Pass all values as one row. bitsandbytes' CPU kernel (0.50.2) reads wrong values if the length of a row is not
        # a multiple of the block size.
        row = (1, self.blocks * BLOCK)
        return dequantize_4bit(codes, _state(scales, row, read_as)).to(kind)


def _state(scales: torch.Tensor, shape: tuple[int, int], kind: torch.dtype) -> Any:
    from bitsandbytes.functional import QuantState

    return QuantState(scales, shape=torch.Size(shape), dtype=kind, blocksize=BLOCK, quant_type="nf4")


def _integers(blocks: torch.Tensor, lowest: int, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = blocks.abs().amax(1) / ((highest - lowest) / 2)
    scales = scales.clamp(min=torch.finfo(SCALE).eps)
    return scales, (blocks * (1.0 / scales[:, None])).round().clamp(lowest, highest).to(torch.int8)


def _numbers(codes: torch.Tensor, scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return codes.to(SCALE).mul_(scales[:, None]).to(kind)


CODINGS: dict[str, type[Coding]] = {"int8": EightBits, "int4": FourBits, "nf4": NormalFloat}
"""Codings by the value of ``--quantize-base``."""


class _Product(torch.autograd.Function):
    """A linear layer that saves the quantized bytes for the backward, and not the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stored: torch.Tensor, bias: torch.Tensor | None, coding: Coding) -> Any:
        ctx.save_for_backward(stored)
        ctx.coding = coding
        return functional.linear(x, coding.read(stored, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (stored,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ ctx.coding.read(stored, gradient.dtype), None, None, None


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a quantized weight. It computes the same as a layer with the dequantized weight.

    Attributes:
        weight: the quantized bytes.
        bias: the bias of the original layer.
    """

    def __init__(self, layer: Any, coding: str, *, has_values: bool = True) -> None:
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
        result: torch.Tensor = _Product.apply(x.to(kind), self.weight, bias, self.coding)
        return result


class _StackReader:
    """Dequantizes a stack of matrices. Each row contains the weights of one output, as in a linear layer.

    Args:
        coding: the coding of all rows of all matrices.
        experts: the number of matrices.
    """

    def __init__(self, coding: Coding, experts: int) -> None:
        self.coding = coding
        self.experts = experts

    def __call__(self, stored: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Dequantize the bytes to [N, in, out]."""
        return self.coding.read(stored, kind).unflatten(0, (self.experts, -1)).transpose(1, 2)


def quantize_stack(experts: Any, name: str, coding: str, *, has_values: bool = True) -> None:
    """Replace one of the stacks of an experts module with its quantized bytes."""
    stack: torch.Tensor = getattr(experts, name).detach()
    shape = tuple(stack.shape)
    rows = (stack.transpose(1, 2) if experts.is_transposed else stack).flatten(0, 1)
    read = _StackReader(CODINGS[coding]((rows.shape[0], rows.shape[1])), shape[0])
    stored = read.coding.write(rows) if has_values else stack.new_empty(read.coding.size, dtype=torch.uint8)
    parameter = nn.Parameter(stored, requires_grad=False)
    note_shape(parameter, shape)
    experts.register_parameter(name, parameter)
    set_stack_reader(experts, name, read)


def is_quantized(layer: Any) -> bool:
    """Return whether the weight under an adapter is quantized."""
    name = getattr(layer, "parameter_name", None)
    base = layer.get_base_layer()
    return isinstance(base, QuantizedLinear) if name is None else reader_of(base, name) is not None
