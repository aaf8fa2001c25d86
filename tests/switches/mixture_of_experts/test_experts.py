"""Grouped products compared with one product per group."""

from __future__ import annotations

import pytest
import torch

from rapidformer_templates.switches.mixture_of_experts.layer import grouped_product

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


def test_autocast_chooses_the_type() -> None:
    inputs, matrices = torch.randn(11, 16), torch.randn(4, 16, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = grouped_product(inputs, matrices, torch.tensor(COUNTS))
    assert result.dtype == torch.bfloat16
