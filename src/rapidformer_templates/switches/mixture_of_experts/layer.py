"""A sparse feed-forward: the gate that chooses the experts of a token, the experts, and the grouping of tokens.

Every decision of the gate depends only on one sample, a row of the batch. So neither the micro batch size nor the
number of workers changes it. The experts are feed-forwards of one shape. Grouped products compute them together, over
tokens sorted by expert.

Mixtures that are part of transformers (mixtral, qwen2_moe, qwen3_moe, olmoe and others) have stacked experts already.
They get the grouped products, which also support mixed precision and fp64, and the losses. transformers adds its
balance loss to the model's loss only if ``config.output_router_logits`` is set, and never if the loss is computed
outside of the model. Here it is always part of the gradient, and the reported loss contains only the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rapidformer_templates.engines.loss import LossLayer
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import ReadStack, base_of, reader_of, stack_factors
from rapidformer_templates.models.model_files import OWN_EXPERTS
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses

GROUPED_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types that torch's grouped product supports."""

RANKS = 8
"""The ranks of adapters are padded to a multiple of this."""


class SparseFeedForward(LossLayer):
    """Replaces a dense feed-forward. Each token is processed by the experts that its gate chooses.

    Args:
        gate, experts: its parts.
        losses: the losses of the whole model, to which this layer adds its own.
        layer: index of this layer among the model's sparse layers, from 0.
        dropout: applied to the output, if the dense feed-forward had dropout there.
    """

    losses: BalanceLosses

    def __init__(
        self, gate: Gate, experts: Experts, losses: BalanceLosses, layer: int, dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.dropout = dropout
        self.losses = losses
        self._layer = layer

    @torch.compiler.disable(reason="which tokens an expert gets is known only from the data")
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [B, T, hidden] to the same shape. Padding gives zeros."""
        rows = hidden if hidden.ndim == 3 else hidden.unsqueeze(0)
        losses = self.losses
        logits = losses.gather(self.gate(rows))
        mask = losses.mask_of(logits)
        chosen, weights, is_kept = base_of(self.gate).route(logits, mask)  # type: ignore[operator]
        weights = losses.attach(weights, logits, chosen, is_kept, mask, self._layer)
        weights, chosen = losses.local_part_of(weights), losses.local_part_of(chosen)
        is_kept = None if is_kept is None else losses.local_part_of(is_kept).flatten(0, 1)
        grouped = group_by_expert(rows.flatten(0, 1), chosen.flatten(0, 1), is_kept, len(self.gate.weight))
        outputs = self.experts(grouped.tokens, grouped.counts, all_routed=is_kept is None)
        output = ungroup(outputs, grouped, weights.flatten(0, 1)).to(hidden.dtype).view_as(hidden)
        return output if self.dropout is None else self.dropout(output)


class Gate(nn.Module):
    """A linear layer over the experts, computed in fp32 also under mixed precision (Fedus et al., 2021).

    Args:
        hidden: size of a token.
        experts: N.
        top_k: number of experts that process a token.
        capacity_factor: see :func:`within_capacity`. None drops nothing.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.top_k = top_k
        self.capacity_factor = capacity_factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, N] of ``rows`` [B, T, hidden]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows.to(wide), self.weight.to(wide))

    def route(
        self, logits: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Choose K experts for each token of whole samples.

        Args:
            logits: [B, T, N].
            mask: [B, T], False for padding.

        Returns:
            (experts in the order of their probability, the weight of each one's output, whether a choice is kept),
            [B, T, K] each. A choice is dropped for padding or a full expert, and its weight is zero. The last is None
            if nothing is dropped.
        """
        with torch.autocast(logits.device.type, enabled=False):
            weights, chosen = choose(logits, self.top_k)
        is_kept = None if mask is None else mask.unsqueeze(-1).expand_as(chosen)
        if self.capacity_factor is not None:
            is_kept = within_capacity(chosen, is_kept, logits.shape[-1], self.capacity_factor)
        if is_kept is not None:
            weights = weights * is_kept
        return chosen, weights, is_kept


def choose(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, experts) of the ``top_k`` most probable experts, [..., K] each.

    Several weights are normalized to sum to one (Lepikhin et al., 2020; Mixtral). A single weight stays the probability
    itself, through which the gate learns (Fedus et al., 2021).
    """
    weights, chosen = logits.softmax(-1).topk(top_k, -1)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def within_capacity(
    chosen: torch.Tensor, is_kept: torch.Tensor | None, experts: int, capacity_factor: float
) -> torch.Tensor:
    """Return which choices the experts have room for, [B, T, K].

    In a row of T tokens, not counting padding, each expert has room for ``ceil(capacity_factor · K · T / N)`` of them.
    Tokens are taken in their order, the first choice of a token before its second. In an order by probability, a causal
    model would see later tokens.

    Args:
        chosen: [B, T, K].
        is_kept: [B, T, K], False for padding. None without padding.
        experts: N.
        capacity_factor: 1 is just enough for an even load.
    """
    rows, tokens, top_k = chosen.shape
    choices = F.one_hot(chosen.reshape(rows, tokens * top_k), experts)
    if is_kept is None:
        room: int | torch.Tensor = math.ceil(capacity_factor * top_k * tokens / experts)
    else:
        choices = choices * is_kept.reshape(rows, -1, 1)
        real = is_kept[..., 0].sum(1)
        room = torch.ceil(capacity_factor * top_k * real.double() / experts).view(rows, 1)
    before = (choices.cumsum(1) - choices).gather(2, chosen.reshape(rows, -1, 1)).squeeze(2)
    fits = (before < room).view_as(chosen)
    return fits if is_kept is None else fits & is_kept


@dataclass(frozen=True)
class Grouped:
    """Tokens sorted by expert. S is tokens × choices.

    Attributes:
        tokens: [S, hidden], sorted by expert. Dropped choices come last.
        counts: [N], number of tokens of each expert.
        permutation: [S], the index of the choice in each row.
        back: the inverse of ``permutation``.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    permutation: torch.Tensor
    back: torch.Tensor


def group_by_expert(tokens: torch.Tensor, chosen: torch.Tensor, is_kept: torch.Tensor | None, experts: int) -> Grouped:
    """Copy each token to the experts that process it.

    Args:
        tokens: [R, hidden].
        chosen: [R, K].
        is_kept: [R, K], False for dropped choices. None if nothing is dropped.
        experts: N.
    """
    visits = (chosen if is_kept is None else chosen.where(is_kept, experts)).flatten()
    permutation = visits.argsort(stable=True)
    numbers = torch.arange(len(permutation), device=permutation.device)
    back = torch.empty_like(permutation).scatter_(0, permutation, numbers)
    # torch.bincount would read the largest value, for which the host waits.
    counts = visits.new_zeros(experts + 1).scatter_add_(0, visits, torch.ones_like(visits))[:experts]
    copies: torch.Tensor = Rearrange.apply(tokens, permutation, back, chosen.shape[-1])
    return Grouped(copies, counts, permutation, back)


def ungroup(outputs: torch.Tensor, grouped: Grouped, weights: torch.Tensor) -> torch.Tensor:
    """Sum the experts' ``outputs`` [S, hidden] of each token with ``weights`` [R, K]. Returns [R, hidden]."""
    returned: torch.Tensor = Rearrange.apply(outputs, grouped.back, grouped.permutation, 1)
    return (returned.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)


class Rearrange(torch.autograd.Function):
    """Copies each row ``copies`` times and reorders the copies.

    The backward reverses this and sums the copies in a fixed order. The scattered sums in the backward of indexing have
    no fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, permutation: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        """Return rows in which row ``i`` is copy ``permutation[i] % copies`` of row ``permutation[i] // copies``.

        Args:
            rows: [R, hidden].
            permutation: [R · copies].
            back: the inverse of ``permutation``.
        """
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, permutation if copies == 1 else permutation // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        gradient = gradients[0].index_select(0, back)
        return gradient if ctx.copies == 1 else gradient.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


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
        if self.down_bias is not None:  # [S, N], the expert that takes each row
            ends, row = counts.cumsum(0), torch.arange(len(tokens), device=counts.device).unsqueeze(1)
            member = (row < ends) & (row >= ends - counts)

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
        return _SegmentProduct.apply(inputs, matrices, counts.tolist())
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
        product: torch.Tensor = grouped_product(inputs, turned, counts, all_routed=all_routed)
    else:
        device = inputs.device.type
        coded = inputs
        if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
            coded = inputs.to(torch.get_autocast_dtype(device))
        product = _CodesProduct.apply(coded, stack, counts, read, all_routed)
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
    added = grouped_product(inner, up, counts, all_routed=all_routed) * factors.scaling
    return product + added.to(product.dtype)  # adapters of a 16-bit base are fp32


class _CodesProduct(torch.autograd.Function):
    """A grouped product that saves the quantized codes for the backward, and not the dequantized stack."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, stored: torch.Tensor, counts: torch.Tensor, read: ReadStack, all_routed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(stored, counts)
        ctx.read, ctx.all_routed = read, all_routed
        return grouped_product(inputs, read(stored, inputs.dtype), counts, all_routed=all_routed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (stored, counts), (gradient,) = ctx.saved_tensors, gradients
        turned = ctx.read(stored, gradient.dtype).transpose(1, 2)
        with torch.autocast(gradient.device.type, enabled=False):
            return grouped_product(gradient, turned, counts, all_routed=ctx.all_routed), None, None, None, None


class _SegmentProduct(torch.autograd.Function):
    """A grouped product with one matrix product per group, for fp64, which torch's grouped product does not support."""

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


IMPLEMENTATION = "rapidformer_grouped"
"""The name under which transformers registers :func:`grouped_experts`."""


def has_own_experts(model: nn.Module) -> bool:
    """Return whether the architecture of a model has its own experts."""
    return getattr(getattr(model, "config", None), "model_type", None) in OWN_EXPERTS


def patch_native_experts(model: Any, *, balance: float | None, z: float) -> BalanceLosses:
    """Compute the experts with grouped products, and add the losses to the gradient.

    Args:
        model: a transformers model with experts.
        balance: coefficient. None uses the model's ``config.router_aux_loss_coef``.
        z: coefficient.

    Raises:
        ModelError: the routers of the model are not found.
    """
    config = model.config
    routers = routers_of(model)
    if not routers:
        message = f"found no router in {type(model).__name__}"
        hint = f"known are the routers of {', '.join(sorted(OWN_EXPERTS))}"
        raise ModelError(message, where="mixture of experts", hint=hint)
    config.output_router_logits = False  # otherwise the model's loss would include them, too
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts)
    model.set_experts_implementation(IMPLEMENTATION)
    configured = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
    experts = routers[0].weight.shape[0]
    losses = BalanceLosses(len(routers), experts, balance=configured if balance is None else balance, z=z)
    losses.watch(model)
    for layer, router in enumerate(routers):
        router.register_forward_hook(partial(_attach, losses, layer))
    return losses


def own_experts(model: nn.Module) -> list[Any]:
    """Return the stacks of experts in an architecture that has its own."""
    return [module for module in model.modules() if has_own_experts(model) and hasattr(module, "_apply_gate")]


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of transformers' mixtures, one for each stack of experts."""
    kinds = {
        recorder.target_class
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for name, recorder in (getattr(part, "_can_record_outputs", None) or {}).items()
        if name == "router_logits"
    }
    return [module for module in model.modules() if type(module) in kinds]


def _attach(
    losses: BalanceLosses, layer: int, router: nn.Module, args: object, output: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Attach the losses after a router, whose output is (logits, weights, experts) of all tokens, flattened."""
    logits, weights, chosen = output
    rows = losses.rows_of(logits)
    attached = losses.attach(weights, rows, losses.rows_of(chosen), None, losses.mask_of(rows), layer)
    return logits, attached, chosen


def grouped_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    dispatch: Callable[..., torch.Tensor] | None = None,
    share: int = 0,
) -> torch.Tensor:
    """Compute transformers' experts with grouped products. Has the signature of its ``ExpertsInterface``.

    Args:
        dispatch: computes outputs with experts on other workers, if the experts are divided: ``TokenDispatcher.run``.
        share: which share of the experts this worker has.
    """
    product = partial(stack_product, experts, share=share)
    grouped = group_by_expert(hidden_states, top_k_index, None, experts.num_experts)

    def compute(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if experts.has_gate:
            inner = experts._apply_gate(product("gate_up_proj", tokens, counts))
        else:
            inner = experts.act_fn(product("up_proj", tokens, counts))
        return product("down_proj", inner, counts)

    if dispatch is None:
        outputs = compute(grouped.tokens, grouped.counts)
    else:
        outputs = dispatch(grouped.tokens, grouped.counts, compute, all_routed=True)
    return ungroup(outputs, grouped, top_k_weights).to(hidden_states.dtype)
