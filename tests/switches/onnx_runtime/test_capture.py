"""Modules that ONNX Runtime captures or refuses, translations of operators, and runs compared with eager ones."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnxruntime

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.switches.onnx_runtime import backend
from rapidformer_templates.switches.onnx_runtime.backend import OnnxBackend
from rapidformer_templates.switches.onnx_runtime.transform import captured, graphs_of, run_in_onnx_runtime
from tests.support import jobs, parity
from tests.support.compiled_jobs import OneLength
from tests.support.selection import by_default


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


# Whole runs. A step has two padded micro batches. Graphs take seconds: one job has batches of many shapes.

STEPS = "--train-iters 8 --global-batch-size 8 --micro-batch-size 4 --clip-grad 0.1 --weight-decay 0.1"
ORT = "--onnx-runtime-training"


class DropoutJob(OneLength):
    """GPT-2 with dropout at the usual three places."""

    shift = 1

    def make(self) -> torch.nn.Module:
        sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
        return GPT2LMHeadModel(GPT2Config(vocab_size=jobs.VOCABULARY, **sizes, **rates))


class LlamaJob(OneLength):
    """Rotary embeddings, grouped keys and values, RMS normalization, gated feed-forward."""

    shift = 1

    def make(self) -> torch.nn.Module:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=jobs.VOCABULARY, **sizes, **heads))


class OneShapeClassJob(OneLength, jobs.ClassJob):
    """BERT as a classifier."""


class OneShapeFrozenJob(OneLength, jobs.FrozenJob):
    """The same classifier with frozen embeddings and a frozen first block."""


jobs.OTHERS |= {"onnx-llama": LlamaJob, "one-shape": OneShapeClassJob, "one-shape-frozen": OneShapeFrozenJob}


def _close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    check = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    check(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]))
    check(torch.tensor(actual["evaluations"]), torch.tensor(expected["evaluations"]))
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        # A key's bias moves all scores of a row equally. Its gradient is rounding, which Adam turns into a whole step.
        if not name.endswith(("key.bias", "c_attn.bias")):
            torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-4, atol=1e-5)


def _graphs(run: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the graphs of a run by the class of the module, such as ``BertLayer``."""
    return [g for g in run["summary"]["receipts"]["onnx_runtime"]["graphs"] if g["name"].startswith(f"{kind} ")]


@pytest.mark.longer
def test_batches_of_many_shapes() -> None:
    """BERT's masked LM with evaluations. Its decoder is tied to the embeddings."""
    expected = parity.reference("masked", False, STEPS)
    actual = parity.train("masked", False, f"{STEPS} {ORT}")
    assert len(actual["curve"]) == 8
    _close(actual, expected)
    told = actual["summary"]["receipts"]["onnx_runtime"]
    assert told["providers"] == ["CPUExecutionProvider"]
    assert told["modules"] == {"BertLayer": 2, "BertOnlyMLMHead": 1}
    assert 0 < told["share_of_time"] < 1
    # One graph for the first shape and one for all others. More for later blocks, whose input has a gradient.
    assert len(_graphs(actual, "BertLayer")) <= 10
    backward = [graph for graph in _graphs(actual, "BertLayer") if graph["name"] == "BertLayer backward"]
    assert sum(graph["runs"] for graph in backward) == 8 * 2 * 2  # steps × micro batches × blocks
    assert all(0 < graph["nodes"] < graph["nodes_exported"] / 2 for graph in backward)


RUNS = [
    ("one-shape-frozen", "", "BertLayer"),
    ("one-shape", "--checkpoint-activations", "BertLayer"),
    ("onnx-llama", "", "LlamaDecoderLayer"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "flags", "kind"), by_default(RUNS[:1], RUNS))
def test_run_follows_eager(job: str, flags: str, kind: str) -> None:
    expected = parity.reference(job, False, STEPS)
    actual = parity.train(job, False, f"{STEPS} {ORT} {flags}")
    assert len(actual["curve"]) == 8
    _close(actual, expected)
    assert {f"{kind} forward", f"{kind} backward"} <= {graph["name"] for graph in _graphs(actual, kind)}
    receipts = actual["summary"]["receipts"]
    if flags:
        assert receipts["saved_tensor_bytes"] < receipts["saved_tensor_bytes_without"]


@pytest.mark.longer
def test_dropout_is_that_of_eager_also_after_a_resume(tmp_path: Path) -> None:
    """Compare GPT-2, stopped after half of its steps, with an uninterrupted run in torch."""
    flags = "--global-batch-size 8 --micro-batch-size 4 --lr 1e-3 --lr-decay-style constant --log-interval 1"

    def curve(way: str, folder: str) -> list[tuple[float, float]]:
        job = DropoutJob([*flags.split(), *way.split(), "--save", str(tmp_path / folder)])
        job.fit()
        found: list[tuple[float, float]] = job.curve
        return found

    whole = curve("--train-iters 6", "eager")
    halves = curve(f"--train-iters 3 {ORT}", "ort") + curve(f"--train-iters 6 --resume {ORT}", "ort")
    torch.testing.assert_close(torch.tensor(halves), torch.tensor(whole), rtol=1e-5, atol=1e-6)
