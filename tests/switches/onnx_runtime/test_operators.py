"""Our translations compared with torch's operators, values and gradients, in one module that is captured once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from rapidformer_templates.switches.onnx_runtime.backend import OnnxBackend


class Everything(nn.Module):
    """Uses each operator once. Every path has a separate result, so that each gradient is checked alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm((5, 6)), nn.LayerNorm(6, elementwise_affine=False)])
        self.frozen = nn.LayerNorm(6)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = x.split(2, dim=-1)
        uneven, rest = x.split([4, 2], dim=-1)
        last = x.split(4, dim=1)[-1]
        return [
            functional.gelu(x),
            functional.gelu(x, approximate="tanh"),
            *(norm(x) for norm in self.norms),
            self.frozen(x),
            functional.softmax(x, dim=1),
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
            functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            uneven.sin() * rest.sum(),
            last,
            x.expand(2, *x.shape) * x.expand(x.shape),
        ]


@pytest.fixture(scope="module")
def both() -> tuple[list[torch.Tensor], list[list[torch.Tensor | None]]]:
    """(outputs, gradients of each output) of ONNX Runtime and of torch."""
    torch.manual_seed(0)
    plain = Everything()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    other = copy.deepcopy(plain)
    x = 3 * torch.randn(2, 5, 6)
    x[0, 0, 0] = 0.0
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    mask[0, :, 3:] = False
    mask[1, 2] = False  # a row that sees nothing
    compiled = torch.compile(other, backend=OnnxBackend("Everything", torch.device("cpu")), fullgraph=True)
    found = []
    for model, parameters in ((compiled, other), (plain, plain)):
        inputs = [x.clone().requires_grad_(), *(p for p in parameters.parameters() if p.requires_grad)]
        outputs = model(inputs[0], mask)
        gradients = []
        for i in range(len(outputs)):
            output = model(inputs[0], mask)[i]
            weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(i))
            gradients.append(torch.autograd.grad((output * weights).sum(), inputs, allow_unused=model is plain))
        found.append((outputs, gradients))
    return found[0], found[1]


@pytest.mark.slow
def test_values(both: tuple) -> None:
    for actual, expected in zip(both[0][0], both[1][0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_gradients(both: tuple) -> None:
    for of_actual, of_expected in zip(both[0][1], both[1][1], strict=True):
        for actual, expected in zip(of_actual, of_expected, strict=True):
            wanted = torch.zeros_like(actual) if expected is None else expected
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
