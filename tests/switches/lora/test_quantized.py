"""A base in 8 or 4 bits: the values of its codes, adapters on it as on the dequantized weights, and its shares."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import Measured
from tests.support import parallel_jobs as _parallel_jobs  # noqa: F401 - registers them
from tests.support.adapters import Recording, read_codes, train_by_hand
from tests.support.jobs import CausalJob, PretrainedJob
from tests.support.messages import Says
from tests.support.parallel_jobs import JOBS
from tests.support.parity import Trained, assert_close, assert_follows, observed, reference, trained, weights_apart
from tests.support.requests import CPU, config_of, on
from tests.support.selection import by_default
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


@pytest.mark.parametrize("coding", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_stand_for_the_nearest_numbers(coding: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, kind = torch.randn(shape), CODINGS[coding](shape)
    stored = kind.write(weight)
    assert stored.dtype == torch.uint8
    assert len(stored) == kind.size
    torch.testing.assert_close(kind.read(stored, torch.float32), read_codes(weight, coding), rtol=1e-6, atol=1e-7)
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
@pytest.mark.parametrize("coding", [pytest.param("int8", marks=pytest.mark.longer), *FORMATS[1:]])
def test_adapters_train_as_beside_the_read_weights(
    coding: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = GPT2LMHeadModel.from_pretrained(base)
    read = GPT2LMHeadModel.from_pretrained(base)
    for module in read.modules():
        if isinstance(module, Conv1D):
            module.weight.data = read_codes(module.weight.data.T, coding).T.contiguous()
    read.save_pretrained(tmp_path / "read")
    plain = run(tmp_path / "read", None, "")
    found = run(
        base, tmp_path / "run", f"--quantize-base {coding} --checkpoint-activations --fused-linear-cross-entropy"
    )
    assert_follows(found, plain, 1e-5, 1e-7, weights=(1e-4, 1e-5))
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

    class Job(Recording, CausalJob):
        def make(self) -> torch.nn.Module:
            return LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)  # type: ignore[no-any-return]

    flags = "--quantize-base nf4 --micro-batch-size 8 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"
    start = [*STEPS.split(), *flags.split(), "--save", str(tmp_path / "start"), "--lr", "0"]
    trained(Job(start))
    job = Job([*STEPS.split(), *flags.split()])
    found = trained(job)
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
    losses, _ = train_by_hand(theirs, job.batches[-4:])
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-6)


def test_codes_that_are_forgotten_end_the_run(base: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setattr("rapidformer_templates.switches.lora.transform._quantize", lambda *args, **more: None)
    with says(RapidformerError):
        run(base, None, "--quantize-base int8")


# Workers.

LORA = "--train-iters 4 --global-batch-size 8 --clip-grad 0.1 --no-export-model --lora-rank 3 --lora-alpha 24"
FOUR = "nf4" if HAS_NF4 else "int4"
BF16 = "--mixed-precision bf16"
LAYOUTS = {  # name: (job, fp64, flags of the layout, coding)
    "ddp": ("gpt2-4-tied", True, "--micro-batch-size 2", FOUR),
    "zero-1": ("gpt2-4-tied", False, "--micro-batch-size 4 --zero-1-memory-optimization", FOUR),
    "zero-2": ("llama-4-tied", False, "--micro-batch-size 2 --zero-2-memory-optimization", "int8"),
    "zero-2-bf16": ("gpt2-4-tied", False, f"--micro-batch-size 4 --zero-2-memory-optimization {BF16}", "int4"),
    "oss": ("bert-4-untied", True, "--micro-batch-size 4 --oss-memory-optimization", "int4"),
    "sdp": ("gpt2-4-tied", False, "--micro-batch-size 2 --oss-sdp-memory-optimization", "int8"),
    "pipeline": (
        "gpt2-4-tied", True, "--micro-batch-size 2 --pipeline-model-parallel-size 2 --checkpoint-activations", FOUR,
    ),
    "offload": ("gpt2-4-tied", False, "--micro-batch-size 4 --cpu-offload", "int8"),
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.longer
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_follows_one_process(layout: str) -> None:
    job, double, flags, coding = LAYOUTS[layout]
    steps, narrow = f"{LORA} --quantize-base {coding}", BF16 in flags
    found = observed(2, job, double, f"{steps} {flags}")[0]
    wanted = reference(job, double, f"{steps} --micro-batch-size 8 {BF16 if narrow else ''}")
    if narrow:  # 8 bits of mantissa, and each half of a batch is rounded separately
        assert_close(found["curve"], wanted["curve"], 2**-7, 0)
        assert weights_apart(found["weights"], wanted["weights"]) < 2**-7
    else:
        assert_follows(found, wanted, *((1e-9, 1e-11) if double else (1e-5, 1e-6, (1e-4, 1e-5))))
    if layout != "pipeline" and not narrow:  # DeepSpeed rounds what is not quantized
        sizes = [run["summary"]["receipts"]["frozen_bytes"] for run in (found, wanted)]
        assert sizes[0] == sizes[1]


# Shares of FSDP and ZeRO-3. Codes are divided, and each step equals one process.

IN_SHARES = (
    "--train-iters 2 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --lr 1e-3 --log-interval 1 --lora-rank 3 --lora-alpha 24"
)
FSDP, PAIR = "--fsdp-memory-optimization", "--fsdp-shard-size 2"
ZERO = "--zero-3-memory-optimization --zero-3-param-persistence-threshold 40"
SHARED = {  # name: (workers, job, fp64, base, other flags)
    "4 bits": (2, "gpt2-4-tied", True, FOUR, f"{FSDP} --micro-batch-size 2"),
    "int8": (2, "llama-4-tied", True, "int8", f"{FSDP} --micro-batch-size 2 --no-fsdp-reshard-after-forward"),
    "int8, bf16": (2, "llama-4-tied", False, "int8", f"{FSDP} --micro-batch-size 4 {BF16} --checkpoint-activations"),
    "half": (2, "gpt2-4-tied", False, "half", f"{FSDP} --micro-batch-size 4 {BF16}"),
    "int4, four workers": (4, "neox-4-untied", True, "int4", f"{FSDP} --micro-batch-size 2"),
    "4 bits, copies": (4, "gpt2-4-tied", True, FOUR, f"{FSDP} --micro-batch-size 1 {PAIR} --checkpoint-activations"),
    "int8, zero-3": (2, "llama-4-tied", False, "int8", f"{ZERO} --micro-batch-size 2 --checkpoint-activations"),
    "int4, zero-3, bf16": (2, "gpt2-4-tied", False, "int4", f"{ZERO} --micro-batch-size 4 {BF16}"),
}


class Observed(Trained):
    """A run and its frozen weights in fewer bits.

    Attributes:
        codes: the whole tensors by name, after the last step.
        held: their bytes on this worker.
    """

    codes: dict[str, torch.Tensor]
    held: dict[str, int]


def _observe(layout: str, flags: str) -> Observed:
    """Train a case, and read the frozen weights from the model."""
    _, job, double, base, _ = SHARED[layout]
    kinds = (torch.bfloat16,) if base == "half" else (torch.uint8,)
    whole_codes: dict[str, torch.Tensor] = {}
    held: dict[str, int] = {}

    class Job(JOBS[job]):  # type: ignore[misc]
        def on_step_end(self, step: int, result: Any) -> None:
            super().on_step_end(step, result)
            for name, tensor in self.model.named_parameters():
                if tensor.dtype not in kinds or tensor.requires_grad:
                    continue
                local = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
                held[canonical_name(name)] = local.untyped_storage().nbytes()
                whole_codes[canonical_name(name)] = _whole(tensor)

    Job.double = double
    run = trained(Job(f"{IN_SHARES} --quantize-base {base} {flags}".split()))
    return {**run, "codes": whole_codes, "held": held}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def _in_workers(workers: Any, layout: str) -> Observed:
    return _observe(layout, SHARED[layout][4])


@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("layout", by_default(["4 bits"], SHARED))
def test_each_worker_has_its_share_of_the_codes_and_follows_one_process(layout: str) -> None:
    world, _, double, base, flags = SHARED[layout]
    wanted = _observe(layout, f"--micro-batch-size 8 {BF16 if BF16 in flags else ''}")
    assert len({loss for loss, _ in wanted["curve"]}) == 2
    receipts = wanted["summary"]["receipts"]
    if base != "half":
        assert receipts["quantized_layers"] == receipts["adapted_layers"] == len(wanted["codes"]) > 0
    # In bf16, products of half a batch are rounded apart from those of the other half.
    rtol = 1e-10 if double else 2**-7 if BF16 in flags else 1e-5
    same = ["frozen_parameters", "quantized_layers", "quantized_bytes", "trained_parameters"]
    if not (ZERO in flags and BF16 in flags):  # DeepSpeed rounds what is not quantized
        same.append("frozen_bytes")
    for found in run_in_workers(world, _in_workers, layout):
        for key in ("curve", "evaluations"):
            assert_close(found[key], wanted[key], rtol, 1e-12 if double else 1e-6)
        assert found["weights"].keys() == wanted["weights"].keys()
        assert weights_apart(found["weights"], wanted["weights"]) < 10 * rtol
        assert found["codes"].keys() == wanted["codes"].keys()
        for name, codes_of_layer in wanted["codes"].items():
            assert torch.equal(found["codes"][name], codes_of_layer), name
            assert wanted["held"][name] == codes_of_layer.nbytes
            least = codes_of_layer.nbytes / (2 if PAIR in flags else world)
            row = codes_of_layer[0].nbytes if base == "half" else 0  # a matrix in 16 bits is cut between its rows
            assert least <= found["held"][name] < least + row + 1
        assert {name: found["summary"]["receipts"][name] for name in same} == {name: receipts[name] for name in same}


OF_FOUR = f"--lora-rank 8 --quantize-base int8 {FSDP}"


@pytest.mark.parametrize(
    ("flags", "bytes_on_workers", "finding"),
    [
        ("", (25, 25, 26, 24), None),
        ("", (25, 25, 100, 25), "codes over 4 workers were expected; a worker has 100 of 100 bytes"),
        (PAIR, (50, 50, 51, 50), None),
        (PAIR, (50, 50, 100, 50), "codes over 2 workers were expected; a worker has 100 of 100 bytes"),
    ],
)
def test_whole_codes_on_any_worker_are_found(
    flags: str, bytes_on_workers: tuple[int, ...], finding: str | None
) -> None:
    config = REGISTRY.complete(config_of(f"{OF_FOUR} {flags}"))
    plan = resolve(config, on(CPU, world_size=4, local_world_size=4, packages={"peft": "0.17"}))
    common = {"trained_parameters": 5, "frozen_parameters": 100, "adapted_layers": 2, "adapted_routers": 0}
    common |= {"quantized_layers": 2, "quantized_bytes": 100}
    ranks = [common | {"quantized_bytes_on_worker": size} for size in bytes_on_workers]
    assert REGISTRY["lora"].acted(Measured(plan, config, ranks)) == finding
