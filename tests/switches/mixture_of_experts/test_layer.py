"""Sparse layers compared with loops over tokens, and with transformers' Mixtral block with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from rapidformer_templates.switches.mixture_of_experts.layer import (
    Experts,
    Gate,
    Rearrange,
    SparseFeedForward,
    grouped_product,
)
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses
from tests.support.mixtures import output_of

ROWS, TOKENS, HIDDEN, WIDTH, EXPERTS = 3, 9, 8, 12, 5


def _layer(top_k: int, *, gated: bool, bias: bool, capacity: float | None = None) -> SparseFeedForward:
    torch.manual_seed(3)
    experts = Experts(EXPERTS, HIDDEN, WIDTH, F.silu, gated=gated, bias=bias)
    layer = SparseFeedForward(
        Gate(HIDDEN, EXPERTS, top_k, capacity), experts, BalanceLosses(1, EXPERTS, balance=0.1, z=0.1), 0
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize(("top_k", "gated", "bias"), [(1, False, True), (2, True, False), (3, True, True)])
def test_layer_is_the_loop_over_its_tokens(
    top_k: int, gated: bool, bias: bool, capacity: float | None, padded: bool
) -> None:
    layer = _layer(top_k, gated=gated, bias=bias, capacity=capacity)
    rows = torch.randn(ROWS, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    if padded:
        mask[1, 4:] = False
        mask[2, 7:] = False
        layer.losses._mask = mask
    inputs = [rows, *layer.parameters()]
    upstream = torch.randn(ROWS, TOKENS, HIDDEN, dtype=torch.float64)
    result = layer(rows)
    layer.losses._unit.zero_()  # only the gradient of the output
    got = torch.autograd.grad(result, inputs, upstream)
    expected = output_of(layer, rows, mask if padded else None, capacity)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for value, reference in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-12)


def test_layer_is_the_block_of_mixtral(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(2, gated=True, bias=False)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).double()
    with torch.no_grad():
        block.gate.weight.copy_(layer.gate.weight)
        both = torch.cat([layer.experts.gate, layer.experts.up], 2)
        block.experts.gate_up_proj.copy_(both.transpose(1, 2))
        block.experts.down_proj.copy_(layer.experts.down.transpose(1, 2))
    rows = torch.randn(ROWS, TOKENS, HIDDEN, dtype=torch.float64)
    upstream = torch.randn_like(rows)
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    result = layer(ours)
    result.backward(upstream)
    with monkeypatch.context() as patch:  # its router rounds to fp32 before the softmax
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor)
        expected = block(theirs)
    expected.backward(upstream)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.gate.weight.grad, block.gate.weight.grad, rtol=1e-10, atol=1e-12)
    down = block.experts.down_proj.grad.transpose(1, 2)
    torch.testing.assert_close(layer.experts.down.grad, down, rtol=1e-10, atol=1e-12)


def test_rearranging_has_the_gradient_of_indexing() -> None:
    order = torch.randperm(12)
    back = order.argsort()
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Rearrange.apply(x, order, back, 3), (rows,))
    torch.testing.assert_close(Rearrange.apply(rows, order, back, 3), rows[order // 3])


def test_what_follows_changes_nothing_before_it() -> None:
    """A causal model must not see in the dropped choices which tokens follow."""
    torch.manual_seed(1)
    gate = Gate(8, 4, 2, capacity_factor=0.75)
    torch.nn.init.normal_(gate.weight)
    rows = torch.randn(2, 12, 8)
    other = torch.cat([rows[:, :7], torch.randn(2, 5, 8)], 1)
    first, second = gate.route(gate(rows), None), gate.route(gate(other), None)
    assert not first.is_kept.all()
    assert torch.equal(first.is_kept[:, :7], second.is_kept[:, :7])


def test_the_gate_computes_in_fp32_under_autocast() -> None:
    gate = Gate(64, 4, 2)
    torch.nn.init.normal_(gate.weight)
    rows = torch.randn(2, 3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = gate(rows)
    torch.testing.assert_close(logits, rows @ gate.weight.T)


COUNTS = [3, 0, 7, 1]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_and_gradients(dtype: torch.dtype, tail: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(sum(COUNTS) + tail, 16, dtype=dtype, requires_grad=True)
    matrices = torch.randn(4, 16, 24, dtype=dtype, requires_grad=True)
    upstream = torch.randn(len(inputs), 24, dtype=dtype)
    result = grouped_product(inputs, matrices, torch.tensor(COUNTS), all_routed=tail == 0)
    got = [result, *torch.autograd.grad(result, [inputs, matrices], upstream)]
    parts = [part @ matrix for part, matrix in zip(inputs.split([*COUNTS, tail]), matrices, strict=False)]
    expected = torch.cat([*parts, inputs.new_zeros(tail, 24)])
    wanted = [expected, *torch.autograd.grad(expected, [inputs, matrices], upstream)]
    for value, reference in zip(got, wanted, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
