"""Linear layers whose frozen weights lie in 8 or 4 bits, and are read into the type of each product, forward and back.

What lies in memory is one tensor of bytes, so that an engine which converts a model's types leaves it alone.
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
"""Numbers that have a scale in common, where there are 4 bits for each (Dettmers et al., *QLoRA*, 2023)."""
SCALE = torch.float32
READ_AS = (torch.float32, torch.bfloat16, torch.float16)
"""Types into which bitsandbytes reads codes."""


@dataclass(frozen=True)
class Coding(ABC):
    """How the numbers of a weight lie in bytes: a scale for each block of them, then their codes.

    Attributes:
        shape: of the weight.
    """

    shape: tuple[int, int]

    @property
    def block(self) -> int:
        """Numbers of a block."""
        return BLOCK

    @property
    def blocks(self) -> int:
        """How many there are; zeros fill the last one."""
        return math.ceil(math.prod(self.shape) / self.block)

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """Bytes of the codes."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.blocks * SCALE.itemsize + self.code_bytes

    @abstractmethod
    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales, codes) of numbers in fp32, of shape (blocks, block)."""

    @abstractmethod
    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """The numbers, block by block."""

    def write(self, weight: torch.Tensor) -> torch.Tensor:
        """The bytes of a weight."""
        flat = weight.detach().float().flatten()
        filled = functional.pad(flat, (0, self.blocks * self.block - len(flat)))
        scales, codes = self.encode(filled.view(self.blocks, self.block))
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in (scales.to(SCALE), codes)])

    def read(self, stored: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """The weight that these bytes stand for, in a type of floating-point numbers."""
        border = self.blocks * SCALE.itemsize
        numbers = self.decode(stored[:border].view(SCALE), stored[border:], kind)
        return numbers.flatten()[: math.prod(self.shape)].view(self.shape)


class EightBits(Coding):
    """Integers from -127 to 127, and a scale a row: the codes of torchao's symmetric ``PerRow``."""

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
    """Integers from -8 to 7, two a byte, and a scale for 64 of them."""

    @property
    def code_bytes(self) -> int:
        return self.blocks * BLOCK // 2

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, codes = _integers(blocks, -8, 7)
        return scales, (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)

    def decode(self, scales: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        pairs = codes.view(torch.int8).view(self.blocks, -1)
        # A shift to the right keeps the sign.
        return _numbers(torch.stack([pairs << 4 >> 4, pairs >> 4], -1).flatten(1), scales, kind)


class NormalFloat(Coding):
    """The 16 quantiles of a normal distribution, two a byte, and a scale for 64 of them, by bitsandbytes."""

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
        # In one row: bitsandbytes' kernel for a CPU (0.50.2) reads rows wrongly that are no multiple of a block.
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
"""By the word of ``--quantize-base``."""


class _Product(torch.autograd.Function):
    """A linear layer that keeps the bytes for the backward, and not the weight that was read from them."""

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
    """A linear layer that is not trained, with its weight in bytes; it computes what the read weight would.

    Attributes:
        weight: the bytes.
        bias: as the layer had it.
    """

    def __init__(self, layer: Any, coding: str, *, has_values: bool = True) -> None:
        """From a linear layer, in the coding of a key of ``CODINGS``; without values, bytes of the same number."""
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
    """A stack of matrices from its bytes; one row is what goes into one output, as in a linear layer.

    Args:
        coding: of all rows of all matrices.
        experts: how many matrices there are.
    """

    def __init__(self, coding: Coding, experts: int) -> None:
        self.coding = coding
        self.experts = experts

    def __call__(self, stored: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """[N, in, out], of the bytes."""
        return self.coding.read(stored, kind).unflatten(0, (self.experts, -1)).transpose(1, 2)


def quantize_stack(experts: Any, name: str, coding: str, *, has_values: bool = True) -> None:
    """Put the bytes of one of the stacks of a module of experts in its place."""
    stack: torch.Tensor = getattr(experts, name).detach()
    shape = tuple(stack.shape)
    rows = (stack.transpose(1, 2) if experts.is_transposed else stack).flatten(0, 1)
    read = _StackReader(CODINGS[coding]((rows.shape[0], rows.shape[1])), shape[0])
    stored = read.coding.write(rows) if has_values else stack.new_empty(read.coding.size, dtype=torch.uint8)
    parameter = nn.Parameter(stored, requires_grad=False)
    note_shape(parameter, shape)
    experts.register_parameter(name, parameter)
    set_stack_reader(experts, name, read)


def lies_in_codes(layer: Any) -> bool:
    """Whether the weight beside which an adapter stands was quantized."""
    name = getattr(layer, "parameter_name", None)
    base = layer.get_base_layer()
    return isinstance(base, QuantizedLinear) if name is None else reader_of(base, name) is not None
