"""Dropout: its rates and scaling, where it is drawn, and the same mask in the backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from rapidformer_templates.switches.onnx_runtime.backend import OnnxBackend
from rapidformer_templates.switches.onnx_runtime.export import dropout_noise


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_noise_has_its_rate_and_a_mean_of_one(rate: float) -> None:
    torch.manual_seed(0)
    noise = dropout_noise(torch.empty(1000, 1000), rate)
    assert noise.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
    deviation = (rate * (1 - rate) / noise.numel()) ** 0.5  # standard deviation of a share of a million draws
    assert float((noise == 0).double().mean()) == pytest.approx(rate, abs=5 * deviation)
    assert float(noise.double().mean()) == pytest.approx(1, abs=5 * deviation / (1 - rate))


def test_all_is_left_out_at_a_rate_of_one() -> None:
    assert dropout_noise(torch.empty(9), 1.0).eq(0).all()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


@pytest.mark.slow
def test_graph_drops_as_eager_does_and_its_backward_alike() -> None:
    plain = Dropped()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend=OnnxBackend("Dropped", torch.device("cpu")), fullgraph=True, dynamic=False)
    x = torch.randn(128, 64)
    kept = []
    for _ in range(2):
        results = []
        for model in (plain, compiled):
            torch.manual_seed(5 + len(kept))
            inputs = x.clone().requires_grad_()
            output = model(inputs)
            (gradient,) = torch.autograd.grad(output.sum(), inputs)
            results.append((output, gradient))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
        kept.append(results[1][0] != 0)
    share = float(kept[0].double().mean())
    assert share == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / kept[0].numel()) ** 0.5)
    assert not torch.equal(*kept)  # drawn again in each run
    compiled.eval()
    torch.testing.assert_close(compiled(x), plain.eval()(x), rtol=1e-5, atol=1e-6)
