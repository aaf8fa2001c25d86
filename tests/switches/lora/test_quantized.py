"""A base in 8 or 4 bits: the values of its codes. Adapters train on it as on the dequantized weights."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import RapidformerError
from tests.support.jobs import CausalJob, PretrainedJob
from tests.support.parallel_jobs import train_all
from tests.support.parity import Trained, reference, trained, weights_apart
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

from rapidformer_templates.switches.lora.layers import CODINGS, QuantizedLinear  # noqa: E402  (peft first)

HAS_NF4 = importlib.util.find_spec("bitsandbytes") is not None
NEEDS_NF4 = pytest.mark.skipif(
    not HAS_NF4, reason="needs bitsandbytes: pip install 'rapidformer_templates[bitsandbytes]'"
)
FORMATS = ["int8", "int4", pytest.param("nf4", marks=NEEDS_NF4)]
SHAPES = [(48, 16), (7, 5), (64, 96)]
"""Rows that are not a multiple of a block of 64, a whole weight that is not, and blocks that cross the ends of rows."""
STEPS = "--train-iters 4 --global-batch-size 8 --micro-batch-size 4 --lr 1e-2 --log-interval 1 --lora-rank 4"

QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of NormalFloat, as listed in the appendix of the paper."""


def expected(weight: torch.Tensor, coding: str) -> torch.Tensor:
    """Return the dequantized weight: the nearest multiple of a step, or quantile, of its row or block of 64."""
    flat = weight.flatten()
    block = weight.shape[1] if coding == "int8" else 64
    read = []
    for part in flat.split(block):
        if coding == "nf4":
            code = torch.tensor(QUANTILES)
            nearest = (part[:, None] / part.abs().max() - code).abs().argmin(1)
            read.append(code[nearest] * part.abs().max())
        else:
            lowest, highest = (-127, 127) if coding == "int8" else (-8, 7)
            step = part.abs().max() / ((highest - lowest) / 2)
            # The greatest number is midway between two integers, and torchao multiplies by the inverse.
            read.append((part * (1 / step)).round().clamp(lowest, highest) * step)
    return torch.cat(read).view(weight.shape)


@pytest.mark.parametrize("coding", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_stand_for_the_nearest_numbers(coding: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, kind = torch.randn(shape), CODINGS[coding](shape)
    stored = kind.write(weight)
    assert stored.dtype == torch.uint8
    assert len(stored) == kind.size
    torch.testing.assert_close(kind.read(stored, torch.float32), expected(weight, coding), rtol=1e-6, atol=1e-7)
    assert torch.equal(kind.read(stored, torch.bfloat16), kind.read(stored, torch.float32).bfloat16())
    assert kind.read(stored, torch.float64).dtype == torch.float64
    zeros = kind.write(torch.zeros(shape))
    assert torch.equal(kind.read(zeros, torch.float32), torch.zeros(shape))


@pytest.mark.parametrize("coding", ["int8", "int4"])
def test_integers_are_those_of_torchao(coding: str) -> None:
    ao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
    torch.manual_seed(0)
    weight, kind = torch.randn(32, 64), CODINGS[coding]((32, 64))
    lowest, highest = (-127, 127) if coding == "int8" else (-8, 7)
    how = (1, kind.block), torch.int8, lowest, highest
    scales, zeros = ao.choose_qparams_affine(weight, ao.MappingType.SYMMETRIC, *how)
    codes = ao.quantize_affine(weight, how[0], scales, zeros, *how[1:])
    theirs = ao.dequantize_affine(codes, how[0], scales, zeros, *how[1:])
    assert torch.equal(kind.read(kind.write(weight), torch.float32), theirs)


@pytest.mark.parametrize("coding", FORMATS)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_computes_with_the_read_weight_and_keeps_its_bytes(coding: str, narrow: bool) -> None:
    torch.manual_seed(0)
    layer: Any = Conv1D(24, 16)
    nn.init.normal_(layer.bias)
    own = QuantizedLinear(layer.requires_grad_(False), coding)
    plain = nn.Linear(16, 24).requires_grad_(False)
    plain.weight.data, plain.bias.data = own.coding.read(own.weight, torch.float32), layer.bias.data
    kept: list[torch.Tensor] = []
    found = []
    for way in (own, plain):
        x = torch.linspace(-2, 3, 5 * 16).view(5, 16).requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=narrow),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, way=way: (kept.append(tensor) if way is own else None, tensor)[1], lambda tensor: tensor
            ),
        ):
            y = way(x)
        y.float().square().sum().backward()
        found.append((y, x.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert [tensor.data_ptr() for tensor in kept if tensor.dtype == torch.uint8] == [own.weight.data_ptr()]
    assert not any(tensor.shape == plain.weight.shape for tensor in kept)


# Runs.


def run(base: Path, folder: Path | None, flags: str) -> Trained:
    """Train adapters. Files are written only if there is a folder for them."""
    kind = type("Job", (PretrainedJob,), {"folder": str(base)})
    return trained(kind([*STEPS.split(), *flags.split(), *(["--save", str(folder)] if folder else [])]))


LAYERS = [16 * 48, 16 * 16, 16 * 64, 64 * 16]


@pytest.mark.slow
@pytest.mark.parametrize("coding", FORMATS)
def test_adapters_train_as_beside_the_read_weights(
    coding: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = GPT2LMHeadModel.from_pretrained(base)
    read = GPT2LMHeadModel.from_pretrained(base)
    for module in read.modules():
        if isinstance(module, Conv1D):
            module.weight.data = expected(module.weight.data.T, coding).T.contiguous()
    read.save_pretrained(tmp_path / "read")
    plain = run(tmp_path / "read", None, "")
    found = run(
        base, tmp_path / "run", f"--quantize-base {coding} --checkpoint-activations --fused-linear-cross-entropy"
    )
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(plain["curve"]), rtol=1e-5, atol=1e-7)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)
    receipts = found["summary"]["receipts"]
    assert receipts["quantized_layers"] == receipts["adapted_layers"] == 8
    assert receipts["frozen_parameters"] == sum(p.numel() for p in whole.parameters())
    each = [n + 4 * {768: 48, 256: 16, 1024: 64}[n] for n in LAYERS[:3]] + [1024 + 4 * 16]
    four = [n // 2 + 4 * n // 64 for n in LAYERS]
    saved = plain["summary"]["receipts"]["frozen_bytes"] - receipts["frozen_bytes"]
    assert saved == 2 * (4 * sum(LAYERS) - sum(each if coding == "int8" else four))
    # The adapters are merged into the original weights.
    assert main(["export", str(tmp_path / "run"), "--merge"]) == 0
    capsys.readouterr()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged").state_dict()
    saved_adapters = load_file(tmp_path / "run/export/adapter_model.safetensors")
    name = "transformer.h.1.mlp.c_fc"
    down, up = (saved_adapters[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    wanted = whole.get_submodule(name).weight + 2 * (up @ down).T
    torch.testing.assert_close(merged[f"{name}.weight"], wanted.detach(), rtol=0, atol=1e-6)


@NEEDS_NF4
def test_nf4_trains_as_peft_beside_bitsandbytes_layers_does(tmp_path: Path) -> None:
    """The widths of Llama are multiples of a block here. Otherwise bitsandbytes' layer reads them wrongly on a CPU."""
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=67, num_key_value_heads=2, max_position_embeddings=64))
    model.save_pretrained(tmp_path / "base")
    batches: list[dict[str, torch.Tensor]] = []

    class Job(CausalJob):
        def make(self) -> torch.nn.Module:
            return LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)  # type: ignore[no-any-return]

        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if model.training and hasattr(self, "model"):
                batches.append(batch)
            return super().compute_loss(model, batch)

    flags = "--quantize-base nf4 --micro-batch-size 8 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"
    start = [*STEPS.split(), *flags.split(), "--save", str(tmp_path / "start"), "--lr", "0"]
    trained(Job(start))
    batches.clear()
    found = trained(Job([*STEPS.split(), *flags.split()]))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for name, module in list(theirs.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            layer = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32,
                compress_statistics=False, quant_type="nf4",
            )  # fmt: skip
            layer.load_state_dict(module.state_dict())
            parent, _, last = name.rpartition(".")
            setattr(theirs.get_submodule(parent), last, layer.to("cpu"))
    theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "start/export"), is_trainable=True).train()
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    losses = []
    for batch in batches[-4:]:
        loss = theirs(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-6)


def test_codes_that_are_forgotten_end_the_run(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidformer_templates.switches.lora.transform._quantize", lambda *args, **more: None)
    with pytest.raises(RapidformerError, match="8 layers in int8 were expected; 0 are"):
        run(base, None, "--quantize-base int8")


# Workers.

LORA = "--train-iters 4 --global-batch-size 8 --clip-grad 0.1 --no-export-model --lora-rank 3 --lora-alpha 24"
FOUR = "nf4" if HAS_NF4 else "int4"
LAYOUTS = {
    "ddp": ("gpt2-4-tied", True, f"--micro-batch-size 2 --quantize-base {FOUR}"),
    "zero-1": ("gpt2-4-tied", False, f"--micro-batch-size 4 --quantize-base {FOUR} --zero-1-memory-optimization"),
    "zero-2": ("llama-4-tied", False, "--micro-batch-size 2 --quantize-base int8 --zero-2-memory-optimization"),
    "zero-2-bf16": (
        "gpt2-4-tied", False,
        "--micro-batch-size 4 --quantize-base int4 --zero-2-memory-optimization --mixed-precision bf16",
    ),
    "oss": ("bert-4-untied", True, "--micro-batch-size 4 --quantize-base int4 --oss-memory-optimization"),
    "sdp": ("gpt2-4-tied", False, "--micro-batch-size 2 --quantize-base int8 --oss-sdp-memory-optimization"),
    "pipeline": (
        "gpt2-4-tied", True,
        f"--micro-batch-size 2 --quantize-base {FOUR} --pipeline-model-parallel-size 2 --checkpoint-activations",
    ),
    "offload": ("gpt2-4-tied", False, "--micro-batch-size 4 --quantize-base int8 --cpu-offload"),
}  # fmt: skip


SHORT = ("zero-2", "zero-2-bf16", "sdp", "pipeline", "offload")
"""Layouts that run by default: each coding, and each way to hold the base."""


def _two_workers(workers: Any, layouts: list[str]) -> dict[str, Any]:
    cases = {name: LAYOUTS[name] for name in layouts}
    return train_all(workers, {name: (job, double, f"{LORA} {f}") for name, (job, double, f) in cases.items()})


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_in_workers(2, _two_workers, selected(request, "layout"))[0]  # type: ignore[no-any-return]


def _mathematics(flags: str) -> str:
    """Return those flags of a run that one process with the same results also needs."""
    words = flags.split()
    kept = ("--quantize-base", "--mixed-precision")
    return " ".join(f"{flag} {value}" for flag, value in itertools.pairwise(words) if flag in kept)


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The runs in one process, with one micro batch per step."""
    return {
        name: reference(job, double, f"{LORA} --micro-batch-size 8 {_mathematics(flags)}")
        for name, (job, double, flags) in LAYOUTS.items()
        if name in selected(request, "layout")
    }


@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("layout", by_default(SHORT, LAYOUTS))
def test_layout_follows_one_process(layout: str, runs: Any, references: Any) -> None:
    found, wanted, double = runs[layout], references[layout], LAYOUTS[layout][1]
    curves = [torch.tensor(each["curve"], dtype=torch.float64) for each in (found, wanted)]
    assert found["weights"].keys() == wanted["weights"].keys()
    if layout.endswith("bf16"):  # 8 bits of mantissa, and each half of a batch is rounded separately
        torch.testing.assert_close(*curves, rtol=2**-7, atol=0)
        assert weights_apart(found["weights"], wanted["weights"]) < 2**-7
    else:
        torch.testing.assert_close(
            *curves, **({"rtol": 1e-9, "atol": 1e-11} if double else {"rtol": 1e-5, "atol": 1e-6})
        )
        limits = {"rtol": 1e-9, "atol": 1e-11} if double else {"rtol": 1e-4, "atol": 1e-5}
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, **limits)
    if layout != "pipeline" and not layout.endswith("bf16"):  # DeepSpeed rounds what is not quantized
        sizes = [each["summary"]["receipts"]["frozen_bytes"] for each in (found, wanted)]
        assert sizes[0] == sizes[1]
