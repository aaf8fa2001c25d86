"""Modules that are captured, modules that are refused, and the absence of copies."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnxruntime

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.switches.onnx_runtime import backend
from rapidformer_templates.switches.onnx_runtime.backend import OnnxBackend
from rapidformer_templates.switches.onnx_runtime.transform import captured, graphs_of, run_in_onnx_runtime


def _capture(model: nn.Module) -> nn.Module:
    building: Any = SimpleNamespace(workers=SimpleNamespace(device=torch.device("cpu")))
    run_in_onnx_runtime(Assembly(model), building)
    return model


def _names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if captured(module)]


def test_blocks_and_heads_are_captured_and_embeddings_are_not() -> None:
    bert = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2))
    assert _names(_capture(bert)) == ["bert.encoder.layer.0", "bert.encoder.layer.1", "cls"]
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    assert _names(_capture(gpt)) == ["transformer.h.0", "transformer.h.1", "lm_head"]


class Stack(nn.Module):
    """Equal blocks in a list, which is all that the layout requires."""

    def __init__(self, block: type[nn.Module], count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Unexportable(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.linalg.pinv(x)


class _OddSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.linalg.pinv(grad)


class BackwardUnexportable(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _OddSlope.apply(super().forward(x))
        return y


class WithoutKernel(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double().erf().float())


class Branching(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "named"),
    [
        pytest.param(Unexportable, "aten.linalg_", marks=pytest.mark.longer),
        (BackwardUnexportable, "backward cannot run in ONNX Runtime: there is no ONNX for aten.linalg_"),
        (WithoutKernel, "Erf"),
        (Branching, "it is not one graph"),
    ],
)
def test_what_cannot_run_is_named_and_refused(block: type[nn.Module], named: str) -> None:
    model = _capture(Stack(block))
    with pytest.raises(ModelError) as refused:
        model(torch.randn(4, 4))
    assert block.__name__ in refused.value.message
    assert named in refused.value.message
    assert refused.value.hint


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no repeated blocks"):
        _capture(nn.Linear(3, 3))


def test_a_build_without_the_provider_of_the_device_is_refused() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this build has it")
    with pytest.raises(ModelError, match="no CUDAExecutionProvider"):
        backend.check_provider(torch.device("cuda"))


def test_the_package_for_cpus_is_told_from_that_for_gpus() -> None:
    cpu_only = "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
    assert installed_packages()["onnxruntime"].endswith("+cpu") is cpu_only


@pytest.mark.slow
def test_equal_blocks_share_graphs_which_read_and_write_the_tensors_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: dict[int, int] = {}
    share = backend._share

    def watched(tensor: torch.Tensor) -> Any:
        value = share(tensor)
        shared[tensor.data_ptr()] = value.data_ptr()
        return value

    monkeypatch.setattr(backend, "_share", watched)
    model = _capture(Stack(Plain, count=3))
    for _ in range(2):
        output = model(torch.randn(2, 4))
        output.sum().backward()
    assert all(ours == theirs for ours, theirs in shared.items())
    weights = {p.data_ptr() for p in model.parameters() if p.ndim == 2}
    assert weights <= shared.keys()  # an input of each run, not a copy from when the graph was made
    assert output.data_ptr() in shared
    told = graphs_of(model)
    assert told["modules"] == {"Plain": 3}
    assert told["providers"] == ["CPUExecutionProvider"]
    assert told["share_of_parameters"] == 1.0
    assert [(graph["name"], graph["runs"]) for graph in told["graphs"][:2]] == [
        ("Plain forward", 6 - _runs_of_others(told)),
        ("Plain backward", 6 - _runs_of_others(told)),
    ]


def _runs_of_others(told: dict[str, Any]) -> int:
    """Count the runs of blocks after the first. Their input has a gradient, so torch.compile separates them."""
    return sum(graph["runs"] for graph in told["graphs"][2:] if "forward" in graph["name"])


# Our translations compared with the operators of torch.


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
def test_values_and_gradients(both: tuple) -> None:
    for actual, expected in zip(both[0][0], both[1][0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for of_actual, of_expected in zip(both[0][1], both[1][1], strict=True):
        for actual, expected in zip(of_actual, of_expected, strict=True):
            wanted = torch.zeros_like(actual) if expected is None else expected
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
