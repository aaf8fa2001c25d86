"""ONNX for aten operators that torch's exporter lacks or splits into many small nodes.

ONNX Runtime runs each element-wise node as a separate pass over memory, so the formulas below need
few passes. Layer normalisation, softmax and GELU are single nodes in the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from onnxscript import opset20
from torch._ops import OpOverload

aten = torch.ops.aten
op: Any = opset20  # its inputs may be numbers and lists, which its types do not show

Operand = Any
"""A value of the ONNX graph. The exporter reads these annotations, and any narrower type would be a constraint."""


def gelu(x: Operand, approximate: str = "none") -> Operand:
    """Return a single node. The exporter's version has five."""
    return op.Gelu(x, approximate=approximate)


def gelu_backward(grad: Operand, x: Operand, approximate: str = "none") -> Operand:
    """Return ``grad · d gelu(x)/dx`` for ``gelu(x) = x Φ(x)`` or its tanh approximation."""
    if approximate == "tanh":
        # gelu(x) = ½ x (1 + tanh u), u = a (x + b x³): its slope is ½ (1 + tanh u + x (1 − tanh² u) u').
        a, b = math.sqrt(2.0 / math.pi), 0.044715
        square = op.Mul(x, x)
        tanh = op.Tanh(op.Mul(x, op.Add(op.Mul(square, a * b), a)))
        slope = op.Add(op.Mul(square, 3.0 * a * b), a)
        rise = op.Mul(op.Mul(x, slope), op.Sub(1.0, op.Mul(tanh, tanh)))
        return op.Mul(grad, op.Mul(op.Add(op.Add(tanh, rise), 1.0), 0.5))
    # With t = x/√2: Φ(x) + x φ(x) = ½ (1 + erf t + 2/√π · t exp(−t²)).
    t = op.Mul(x, math.sqrt(0.5))
    bell = op.Exp(op.Sub(math.log(2.0 / math.sqrt(math.pi)), op.Mul(t, t)))
    twice = op.Add(op.Add(op.Erf(t), op.Mul(t, bell)), 1.0)
    return op.Mul(op.Mul(grad, 0.5), twice)


def layer_norm_backward(
    grad: Operand,
    x: Operand,
    normalized_shape: Sequence[int],
    mean: Operand,
    rstd: Operand,
    weight: Operand,
    bias: Operand,
    output_mask: Sequence[bool],
) -> tuple[Operand, Operand, Operand]:
    """Return the gradients of layer normalisation by input, weight and bias. Gradients not requested are placeholders.

    With x̂ = (x − mean) · rstd and g = grad · weight, dx = rstd (g − mean(g) − x̂ mean(g x̂)).
    """
    inner = list(range(-len(normalized_shape), 0))
    outer = list(range(len(x.shape) - len(normalized_shape)))
    normal = op.Mul(op.Sub(x, mean), rstd)
    along = op.Mul(grad, normal)
    of_input, of_weight, of_bias = (op.Identity(mean) for _ in range(3))  # the exporter needs a value for each
    if output_mask[0]:
        scaled, scaled_along = (grad, along) if weight is None else (op.Mul(grad, weight), op.Mul(along, weight))
        level, tilt = op.ReduceMean(scaled, inner), op.ReduceMean(scaled_along, inner)
        of_input = op.Mul(op.Sub(scaled, op.Add(op.Mul(normal, tilt), level)), rstd)
    if output_mask[1]:
        of_weight = op.ReduceSum(along, outer, keepdims=0)
    if output_mask[2]:
        of_bias = op.ReduceSum(grad, outer, keepdims=0)
    return of_input, of_weight, of_bias


def safe_softmax(x: Operand, dim: int, dtype: int = -1) -> Operand:
    """Softmax in which a row of only −∞ (every key is masked) becomes zero instead of 0/0."""
    probabilities = op.Softmax(x, axis=dim)
    return op.Where(op.IsNaN(probabilities), 0.0, probabilities)


def softmax_backward(grad: Operand, output: Operand, dim: int, input_dtype: int) -> Operand:
    """Return ``y g − y Σ y g``."""
    share = op.Mul(grad, output)
    return op.Sub(share, op.Mul(output, op.ReduceSum(share, [dim])))


def split(x: Operand, size: int, dim: int = 0) -> Sequence[Operand]:
    """Split into pieces of ``size`` along ``dim``. The last may be smaller."""
    length = x.shape[dim]
    return split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)], dim)


def split_with_sizes(x: Operand, sizes: Sequence[int], dim: int = 0) -> Sequence[Operand]:
    """Split into pieces of ``sizes`` along ``dim``.

    The exporter's version makes a sequence and copies each piece from it.
    """
    if len(set(sizes)) == 1 and len(sizes) > 1:
        pieces: Sequence[Operand] = op.Split(x, axis=dim, num_outputs=len(sizes))
        return pieces
    return [op.Slice(x, [start], [end], [dim]) for start, end in pairwise(accumulate(sizes, initial=0))]


TRANSLATIONS: Mapping[OpOverload, Callable[..., Operand]] = {
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._safe_softmax.default: safe_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
}
"""ONNX functions by aten operator, in addition to those of torch's exporter."""
