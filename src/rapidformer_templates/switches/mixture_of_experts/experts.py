"""The experts: feed-forwards of one shape, computed together by products over tokens that are grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.models.adapters import ReadStack, factors_beside, reader_of

GROUPED_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What torch's grouped product can multiply."""

SHARE = "share_of_experts"
"""Of a module whose stacks have a share of the experts, where others have the rest: which of the shares."""
RANKS = 8
"""Ranks of adapters are filled up to a multiple of it."""


class Experts(nn.Module):
    """N feed-forwards ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``, whose matrices are stacked.

    Args:
        experts: N.
        hidden, width: sizes of a token and of the inner layer.
        activation: of the inner layer.
        gated: whether the activation's output is multiplied by another projection.
        bias: whether the projections have one.

    Attributes:
        tensor_styles: how tensor parallelism divides the parameters.
        bias_factor: of what ``down`` adds: 0 where another worker of those that share the matrices adds it.
        is_transposed: as transformers and peft say it, that a matrix is (input, output) features.
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
        shapes = {"up": (hidden, width), "gate": (hidden, width) if gated else None, "down": (width, hidden)}
        for name, shape in shapes.items():
            matrix = None if shape is None else nn.Parameter(torch.empty(experts, *shape))
            offset = None if shape is None or not bias else nn.Parameter(torch.zeros(experts, shape[1]))
            self.register_parameter(name, matrix)
            self.register_parameter(f"{name}_bias", offset)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, *, all_taken: bool = True) -> torch.Tensor:
        """The experts' outputs.

        Args:
            tokens: [S, hidden], those of the first expert first.
            counts: [N], tokens of each expert.
            all_taken: False if behind the last expert's tokens there may be some that none takes.

        Returns:
            [S, hidden]; zeros for tokens that no expert takes.
        """
        member = None
        if self.down_bias is not None:
            member = _members(counts, len(tokens))

        def project(inputs: torch.Tensor, name: str) -> torch.Tensor:
            product = stack_product(self, name, inputs, counts, all_taken=all_taken)
            if member is None:
                return product
            offset = local_part(getattr(self, f"{name}_bias")).to(product.dtype)
            # A product, so that the sums of its backward have an order, also on a GPU.
            added = member.to(product.dtype) @ offset
            return product + (added * self.bias_factor if name == "down" else added)

        if self.gate is not None:
            inner = self.activation(project(tokens, "gate")) * project(tokens, "up")
        else:
            inner = self.activation(project(tokens, "up"))
        return project(inner, "down")


def _members(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, N], which expert takes which row."""
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=counts.device).unsqueeze(1)
    return (row < ends) & (row >= ends - counts)


def grouped_product(
    inputs: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, *, all_taken: bool = True
) -> torch.Tensor:
    """Rows times the matrix of their group.

    Args:
        inputs: [S, in], sorted by group.
        matrices: [N, in, out].
        counts: [N], rows of each group.
        all_taken: False if there may be rows behind the last group, which become zero.

    Returns:
        [S, out], under autocast in its type.
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
    if all_taken:
        return F.grouped_mm(inputs, matrices, offs=ends)
    # torch leaves rows behind the last group as they were in memory, in the product as in the gradient.
    taken = (torch.arange(len(inputs), device=ends.device) < ends[-1]).unsqueeze(1)
    return F.grouped_mm(inputs.where(taken, 0), matrices, offs=ends).where(taken, 0)


def stack_product(
    experts: Any, name: str, inputs: torch.Tensor, counts: torch.Tensor, *, all_taken: bool = True
) -> torch.Tensor:
    """Rows times the matrices of one stack of experts, and what adapters beside it add."""
    read, stack = reader_of(experts, name), local_part(getattr(experts, name))
    if read is None:
        turned = stack if experts.is_transposed else stack.transpose(1, 2)
        product = grouped_product(inputs, turned, counts, all_taken=all_taken)
    else:
        product = _product_of_codes(inputs, stack, counts, read, all_taken)
    factors = factors_beside(experts, name)
    if factors is None:
        return product
    first = getattr(experts, SHARE, 0) * len(counts)
    here = slice(first, first + len(counts))
    # torch's grouped product on a GPU wants rows of a multiple of 16 bytes.
    more = -factors.down.shape[2] % RANKS
    down = F.pad(factors.down[here], (0, more)).contiguous()
    up = F.pad(factors.up[here], (0, 0, 0, more)).contiguous()
    inner = grouped_product(inputs, down, counts, all_taken=all_taken)
    return product + grouped_product(inner, up, counts, all_taken=all_taken) * factors.scaling


def _product_of_codes(
    inputs: torch.Tensor, stored: torch.Tensor, counts: torch.Tensor, read: ReadStack, all_taken: bool
) -> torch.Tensor:
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
        inputs = inputs.to(torch.get_autocast_dtype(device))
    product: torch.Tensor = _CodesProduct.apply(inputs, stored, counts, read, all_taken)
    return product


class _CodesProduct(torch.autograd.Function):
    """Keeps the codes for the backward, and not the stack that was read from them."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, stored: torch.Tensor, counts: torch.Tensor, read: ReadStack, all_taken: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(stored, counts)
        ctx.read, ctx.all_taken = read, all_taken
        return grouped_product(inputs, read(stored, inputs.dtype), counts, all_taken=all_taken)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (stored, counts), (gradient,) = ctx.saved_tensors, gradients
        turned = ctx.read(stored, gradient.dtype).transpose(1, 2)
        with torch.autocast(gradient.device.type, enabled=False):
            return grouped_product(gradient, turned, counts, all_taken=ctx.all_taken), None, None, None, None


class _SegmentProduct(torch.autograd.Function):
    """The same, a product a group, for types that torch's grouped product has not: fp64."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(inputs, matrices)
        ctx.counts = [*counts, len(inputs) - sum(counts)]
        parts = inputs.split(ctx.counts)
        products = [part @ matrix for part, matrix in zip(parts, matrices, strict=False)]
        return torch.cat([*products, inputs.new_zeros(ctx.counts[-1], matrices.shape[2])])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        inputs, matrices = ctx.saved_tensors
        groups = list(zip(inputs.split(ctx.counts), gradients[0].split(ctx.counts), matrices, strict=False))
        to_inputs = [gradient @ matrix.T for _, gradient, matrix in groups]
        to_matrices = torch.stack([part.T @ gradient for part, gradient, _ in groups])
        return torch.cat([*to_inputs, inputs.new_zeros(ctx.counts[-1], inputs.shape[1])]), to_matrices, None
