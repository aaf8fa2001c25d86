"""The experts: feed-forwards of one shape. Grouped products compute them together, over tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F  # noqa: N812 - its usual name

from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.adapters import ReadStack, reader_of, stack_factors

GROUPED_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types that torch's grouped product supports."""

RANKS = 8
"""The ranks of adapters are padded to a multiple of this."""


class Experts(nn.Module):
    """N feed-forwards ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``, with stacked matrices.

    Args:
        experts: N.
        hidden, width: sizes of a token and of the inner layer.
        activation: activation of the inner layer.
        gated: whether the activation's output is multiplied with another projection.
        bias: whether the projections have biases.

    Attributes:
        tensor_styles: how tensor parallelism divides the parameters.
        bias_factor: factor of ``down``'s bias. 0 if another worker that shares the matrices adds it.
        share: which share of the experts the stacks have, if they are divided over workers.
        is_transposed: whether a matrix is (input, output) features, in the meaning of transformers and peft.
    """

    up: nn.Parameter
    down: nn.Parameter
    gate: nn.Parameter | None
    up_bias: nn.Parameter | None
    gate_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    is_transposed: ClassVar[bool] = True
    tensor_styles: ClassVar[Mapping[str, str]] = {
        "": "moe_tp_experts",
        **dict.fromkeys(("up", "gate", "up_bias", "gate_bias"), "experts_colwise"),
        "down": "experts_rowwise",
        "down_bias": "replicated_with_grad_allreduce",
    }

    def __init__(
        self,
        experts: int,
        hidden: int,
        width: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        gated: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.bias_factor = 1.0
        self.share = 0
        shapes = {"up": (hidden, width), "gate": (hidden, width) if gated else None, "down": (width, hidden)}
        for name, shape in shapes.items():
            matrix = None if shape is None else nn.Parameter(torch.empty(experts, *shape))
            offset = None if shape is None or not bias else nn.Parameter(torch.zeros(experts, shape[1]))
            self.register_parameter(name, matrix)
            self.register_parameter(f"{name}_bias", offset)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, *, all_routed: bool = True) -> torch.Tensor:
        """Return the outputs of the experts.

        Args:
            tokens: [S, hidden], sorted by expert.
            counts: [N], number of tokens of each expert.
            all_routed: False if there may be tokens after those of the last expert, which no expert takes.

        Returns:
            [S, hidden]. Tokens that no expert takes are zero.
        """
        member = None
        if self.down_bias is not None:
            member = _members(counts, len(tokens))

        def project(inputs: torch.Tensor, name: str) -> torch.Tensor:
            product = stack_product(self, name, inputs, counts, share=self.share, all_routed=all_routed)
            if member is None:
                return product
            offset = local_part(getattr(self, f"{name}_bias")).to(product.dtype)
            # A matrix product, so that its backward sums in a fixed order, also on a GPU.
            bias = member.to(product.dtype) @ offset
            return product + (bias * self.bias_factor if name == "down" else bias)

        if self.gate is not None:
            inner = self.activation(project(tokens, "gate")) * project(tokens, "up")
        else:
            inner = self.activation(project(tokens, "up"))
        return project(inner, "down")


def _members(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a mask [rows, N] of the expert that takes each row."""
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=counts.device).unsqueeze(1)
    return (row < ends) & (row >= ends - counts)


def grouped_product(
    inputs: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, *, all_routed: bool = True
) -> torch.Tensor:
    """Multiply each row with the matrix of its group.

    Args:
        inputs: [S, in], sorted by group.
        matrices: [N, in, out].
        counts: [N], number of rows in each group.
        all_routed: False if there may be rows after the last group. Their results are zero.

    Returns:
        [S, out], in autocast's type if autocast is on.
    """
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
        compute = torch.get_autocast_dtype(device)
        inputs, matrices = inputs.to(compute), matrices.to(compute)
    elif inputs.dtype != matrices.dtype:
        inputs = inputs.to(matrices.dtype)
    if inputs.dtype not in GROUPED_TYPES:
        product: torch.Tensor = _SegmentProduct.apply(inputs, matrices, counts.tolist())
        return product
    ends = counts.cumsum(0).to(torch.int32)
    if all_routed:
        return F.grouped_mm(inputs, matrices, offs=ends)
    # torch leaves rows after the last group uninitialized, in the product and in the gradient.
    is_routed = (torch.arange(len(inputs), device=ends.device) < ends[-1]).unsqueeze(1)
    return F.grouped_mm(inputs.where(is_routed, 0), matrices, offs=ends).where(is_routed, 0)


def stack_product(
    experts: nn.Module,
    name: str,
    inputs: torch.Tensor,
    counts: torch.Tensor,
    *,
    share: int = 0,
    all_routed: bool = True,
) -> torch.Tensor:
    """Multiply each row with the matrix of its expert in one stack, and add the output of the stack's adapters.

    Args:
        share: which share of the experts the stack has. The factors of adapters are stored for all experts.
    """
    read, stack = reader_of(experts, name), local_part(getattr(experts, name))
    if read is None:
        turned = stack if experts.is_transposed else stack.transpose(1, 2)
        product = grouped_product(inputs, turned, counts, all_routed=all_routed)
    else:
        product = _product_of_codes(inputs, stack, counts, read, all_routed)
    factors = stack_factors(experts, name)
    if factors is None:
        return product
    first = share * len(counts)
    own_rows = slice(first, first + len(counts))
    # torch's grouped product on a GPU requires rows of a multiple of 16 bytes.
    more = -factors.down.shape[2] % RANKS
    down = F.pad(factors.down[own_rows], (0, more)).contiguous()
    up = F.pad(factors.up[own_rows], (0, 0, 0, more)).contiguous()
    inner = grouped_product(inputs, down, counts, all_routed=all_routed)
    return product + grouped_product(inner, up, counts, all_routed=all_routed) * factors.scaling


def _product_of_codes(
    inputs: torch.Tensor, stored: torch.Tensor, counts: torch.Tensor, read: ReadStack, all_routed: bool
) -> torch.Tensor:
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
        inputs = inputs.to(torch.get_autocast_dtype(device))
    product: torch.Tensor = _CodesProduct.apply(inputs, stored, counts, read, all_routed)
    return product


class _CodesContext(FunctionCtx):
    read: ReadStack
    all_routed: bool
    saved_tensors: tuple[torch.Tensor, torch.Tensor]


class _CodesProduct(torch.autograd.Function):
    """A grouped product that saves the quantized codes for the backward, and not the dequantized stack."""

    @staticmethod
    def forward(
        ctx: _CodesContext,
        inputs: torch.Tensor,
        stored: torch.Tensor,
        counts: torch.Tensor,
        read: ReadStack,
        all_routed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(stored, counts)
        ctx.read, ctx.all_routed = read, all_routed
        return grouped_product(inputs, read(stored, inputs.dtype), counts, all_routed=all_routed)

    @staticmethod
    def backward(ctx: _CodesContext, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (stored, counts), (gradient,) = ctx.saved_tensors, gradients
        turned = ctx.read(stored, gradient.dtype).transpose(1, 2)
        with torch.autocast(gradient.device.type, enabled=False):
            return grouped_product(gradient, turned, counts, all_routed=ctx.all_routed), None, None, None, None


class _SegmentContext(FunctionCtx):
    counts: list[int]
    saved_tensors: tuple[torch.Tensor, torch.Tensor]


class _SegmentProduct(torch.autograd.Function):
    """A grouped product with one matrix product per group, for fp64, which torch's grouped product does not support."""

    @staticmethod
    def forward(ctx: _SegmentContext, inputs: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(inputs, matrices)
        ctx.counts = [*counts, len(inputs) - sum(counts)]
        parts = inputs.split(ctx.counts)
        products = [part @ matrix for part, matrix in zip(parts, matrices, strict=False)]
        return torch.cat([*products, inputs.new_zeros(ctx.counts[-1], matrices.shape[2])])

    @staticmethod
    def backward(ctx: _SegmentContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        inputs, matrices = ctx.saved_tensors
        groups = list(zip(inputs.split(ctx.counts), gradients[0].split(ctx.counts), matrices, strict=False))
        to_inputs = [gradient @ matrix.T for _, gradient, matrix in groups]
        to_matrices = torch.stack([part.T @ gradient for part, gradient, _ in groups])
        return torch.cat([*to_inputs, inputs.new_zeros(ctx.counts[-1], inputs.shape[1])]), to_matrices, None
