"""fp8 products: torchao's numbers, one process's numbers in each layout, and receipts that count what ran."""

import contextlib
import functools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ModelError, SwitchDidNothing
from rapidformer_templates.system import process_state
from tests.support.fp8_jobs import PER_BLOCK, Fp8Llama
from tests.support.lines import Died
from tests.support.parity import Trained, assert_close, assert_follows, observed, reference, train
from tests.support.parity import weights_apart as apart
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

float8: Any = pytest.importorskip(
    "torchao.float8", reason="needs torchao: pip install 'rapidformer_templates[torchao]'"
)

from rapidformer_templates.switches.fp8 import transform  # noqa: E402  (torchao first)

pytestmark = pytest.mark.slow

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SHORT = by_default(["rowwise"], RECIPES)
STEPS = "--train-iters 6 --global-batch-size 8 --micro-batch-size 2 --device cpu --mixed-precision bf16 --fp8-emulate"
STEP_PRODUCTS = 4 * PER_BLOCK * 4
"""Forward products of a step in all workers together: four micro batches, four blocks."""
WIDE = "--keep-fp32-parameters"
BF16 = 2**-7
"""Relative rounding of bf16, with which another order of its sums shows."""


def _products(run: Trained) -> dict[str, int]:
    products: dict[str, int] = run["summary"]["receipts"]["fp8_products"]
    return products


def _in_bf16(module: Any, forward: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a layer of torchao as it calls itself under autocast of a GPU, whose products autocast does not see."""
    with torch.autocast("cpu", enabled=False):
        result: torch.Tensor = forward(x.bfloat16())
        return result


def _train_with_torchao(recipe: str, batches: list[dict[str, torch.Tensor]], seed: int) -> list[float]:
    """Train the same model, converted by torchao, in a loop without this library."""
    process_state.seed_all(seed)
    model = Fp8Llama([]).make().train()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)  # before any layer has it
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    layers = [module for module in model.modules() if type(module).__name__ == "Float8Linear"]
    assert len(layers) == 4 * PER_BLOCK
    for layer in layers:
        layer.forward = functools.partial(_in_bf16, layer, layer.forward)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    losses = []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_torchao_alone(recipe: str) -> None:
    flags = f"--train-iters 20 --global-batch-size 8 --micro-batch-size 8 --lr 1e-3 --lr-decay-style constant {WIDE}"
    flags += f" --weight-decay 0 --clip-grad 0 --mixed-precision bf16 --fp8-recipe {recipe} --fp8-emulate --device cpu"
    job = Fp8Llama(flags.split())
    job.fit()
    losses = [loss for loss, _ in job.curve]
    alone = _train_with_torchao(recipe, job.batches[-20:], job.config.training.seed)
    assert len(losses) == 20
    assert_close(losses, alone, rtol=1e-6, atol=0)
    assert losses[-1] < losses[0] - 0.1
    plain = reference("fp8-llama", False, flags.partition(" --fp8")[0] + " --device cpu", lr=None)
    assert max(abs(a - b) for a, (b, _) in zip(losses, plain["curve"], strict=True)) > 1e-4  # it is not bf16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [5, 32])
def test_both_kinds_of_layers_multiply_alike(recipe: str, tokens: int) -> None:
    """torchao's own layer, which has no autocast on a CPU, is the reference. No number of tokens is refused."""
    torch.manual_seed(0)
    layer, other = nn.Linear(32, 48).bfloat16(), Conv1D(48, 32).bfloat16()
    other.weight.data, other.bias.data = layer.weight.data.T.contiguous(), layer.bias.data
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    kernels = transform._kernels(config)
    theirs: Any = float8.convert_to_float8_training(nn.Sequential(layer), config=config)[0]
    x = torch.randn(2, tokens, 32).bfloat16()
    found = []
    for forward, weight in (
        (theirs, theirs.weight),
        (transform.Fp8Product(layer, config, kernels), layer.weight),
        (transform.Fp8Product(other, config, kernels), other.weight),
    ):
        layer.zero_grad()
        own = x.clone().requires_grad_()
        result = forward(own)
        result.float().square().sum().backward()
        gradient = weight.grad if weight.shape == layer.weight.shape else weight.grad.T
        found.append((result.detach(), own.grad, gradient.clone()))
    for mine in found[1:]:
        for tensor, expected in zip(mine, found[0], strict=True):
            assert torch.equal(tensor, expected)


EXACT = {
    "replicas": ("", ""),
    "distributed optimizer": ("--use-distributed-optimizer", ""),
    "recomputation": ("--checkpoint-activations", ""),
    "products kept": ("--checkpoint-activations --recompute-granularity selective", ""),
    "compiled": ("--torch-compile aot_eager", ""),
    "oss": ("--oss-memory-optimization", WIDE),
    "oss-sdp": ("--oss-sdp-memory-optimization", WIDE),
}
"""Flags of two workers that have whole weights, and of one process that computes the same."""


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", SHORT)
@pytest.mark.parametrize("layout", by_default(["replicas", "recomputation", "compiled", "oss"], list(EXACT)))
def test_whole_weights_give_the_numbers_of_one_process(layout: str, recipe: str) -> None:
    flags, of_one = EXACT[layout]
    fp8 = f"{STEPS} --fp8-recipe {recipe}"
    wanted = reference("fp8-llama", False, f"{fp8} {of_one}")
    found, other = observed(2, "fp8-llama", False, f"{fp8} {flags}")
    assert_follows(found, wanted, 1e-6, weights=(1e-5, 1e-6))
    if layout == "compiled":  # all blocks run one graph for the first length of rows, and one for the others
        assert _products(found)["forward"] == 2 * PER_BLOCK
    else:
        ran = _products(found)["forward"] + _products(other)["forward"]
        assert ran == STEP_PRODUCTS * (2 if layout == "recomputation" else 1)


GATHERED = {
    "fsdp": "--fsdp-memory-optimization",
    "recomputation": "--fsdp-memory-optimization --checkpoint-activations",
    "sums once": "--fsdp-memory-optimization --no-fsdp-reduce-every-micro-batch --no-fsdp-reshard-after-forward",
    "compiled": "--fsdp-memory-optimization --torch-compile aot_eager",
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(["fsdp", "compiled"], list(GATHERED)))
@pytest.mark.parametrize("gather", [False, True], ids=["bf16", "fp8"])
def test_two_shards_give_the_numbers_of_one(layout: str, gather: bool) -> None:
    """FSDP on one worker computes in its types of norms and embeddings, too."""
    fp8 = f"{STEPS} --fp8-recipe tensorwise {'--fp8-all-gather' if gather else ''}"
    wanted = observed(1, "fp8-llama", False, f"{fp8} --fsdp-memory-optimization")[0]
    found = observed(2, "fp8-llama", False, f"{fp8} {GATHERED[layout]}")[0]
    assert_follows(found, wanted, 1e-5, weights=(1e-5, 1e-6))
    blocks = sum(weight.numel() for name, weight in wanted["weights"].items() if "proj" in name)
    assert found["summary"]["receipts"]["gathered_in_8_bits"] == (blocks if gather else 0)
    one = reference("fp8-llama", False, f"{STEPS} --fp8-recipe tensorwise")
    assert_close([loss for loss, _ in found["curve"]], [loss for loss, _ in one["curve"]], rtol=BF16, atol=0)


@pytest.mark.distributed
def test_copies_of_shards_that_are_gathered_in_fp8() -> None:
    fp8 = f"{STEPS} --fp8-recipe tensorwise --fp8-all-gather --fsdp-memory-optimization"
    wanted = observed(1, "fp8-llama", False, fp8)[0]
    assert_follows(observed(4, "fp8-llama", False, f"{fp8} --fsdp-shard-size 2")[0], wanted, 1e-5, weights=(1e-5, 1e-6))


DIVIDED = {
    "pipeline": "--pipeline-model-parallel-size 2",
    "pipeline with shards": "--pipeline-model-parallel-size 2 --zero-2-memory-optimization",
    "tensor": "--tensor-model-parallel-size 2",
    "sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context": "--context-parallel-size 2",
}


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", SHORT)
@pytest.mark.parametrize("layout", by_default(["pipeline", "sequence"], list(DIVIDED)))
@pytest.mark.parametrize("job", ["fp8-llama", "fp8-gpt2"])
def test_a_divided_model_is_one_process_within_the_rounding_of_bf16(job: str, layout: str, recipe: str) -> None:
    if layout == "context" and recipe == "tensorwise":
        pytest.skip("refused by RF295")
    fp8 = f"{STEPS} --fp8-recipe {recipe}"
    wanted = reference(job, False, fp8)
    found, other = observed(2, job, False, f"{fp8} {DIVIDED[layout]}")
    assert_close([loss for loss, _ in found["curve"]], [loss for loss, _ in wanted["curve"]], rtol=BF16, atol=0)
    assert apart(found["weights"], wanted["weights"]) < BF16
    ran = _products(found)["forward"] + _products(other)["forward"]
    assert ran == _products(wanted)["forward"] * (1 if "pipeline" in layout else 2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_receipt_counts_each_kind_of_product(recipe: str) -> None:
    run = reference("fp8-llama", False, f"{STEPS} --fp8-recipe {recipe}")
    of_weights = 0 if recipe == "rowwise_with_gw_hp" else STEP_PRODUCTS
    kinds = {"forward": STEP_PRODUCTS, "input_gradient": STEP_PRODUCTS, "weight_gradient": of_weights}
    assert _products(run) == kinds
    assert run["summary"]["receipts"]["fp8_layers"] == {"fp8": 4 * PER_BLOCK}


def test_graphs_are_counted_if_a_cache_has_them() -> None:
    flags = f"{STEPS} --fp8-recipe rowwise --torch-compile"
    first, again = (_products(train("fp8-llama", False, flags)) for _ in range(2))
    assert again == first == dict.fromkeys(transform.KINDS, 2 * PER_BLOCK)


def test_layers_are_left_out_by_name_and_size() -> None:
    run = train("odd-llama", False, f"{STEPS} --fp8-recipe rowwise --fp8-filter [kv]_proj$")
    assert run["summary"]["receipts"]["fp8_layers"] == {
        "fp8": 4 * 2,
        "--fp8-filter": 4 * 2,
        "88 × 64 is not in multiples of 16": 4 * 2,
        "64 × 88 is not in multiples of 16": 4,
    }
    assert _products(run)["forward"] == 4 * 4 * 2


def test_adapters_stay_in_bf16() -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    run = train("fp8-llama", False, f"{STEPS} --fp8-recipe rowwise --lora-rank 16")
    assert run["summary"]["receipts"]["fp8_layers"] == {
        "fp8": 4 * PER_BLOCK,
        "a router or an adapter": 2 * 4 * PER_BLOCK,
    }
    assert _products(run)["forward"] == STEP_PRODUCTS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-filter nowhere", "no layer's name contains nowhere"),
        ("--fp8-filter .", "no layer can multiply in fp8"),
    ],
)
def test_a_filter_that_leaves_out_none_or_all(flags: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        train("fp8-llama", False, f"{STEPS} --fp8-recipe rowwise {flags}")


def _forget(assembly: Any, building: Any) -> None:
    """Take the place of the transform."""


@pytest.mark.parametrize("kind", ["forward", "input_gradient", "weight_gradient"])
def test_a_run_without_products_of_a_kind_ends(kind: str) -> None:
    roles = {operands: "other" if name == kind else name for operands, name in transform.ROLES.items()}

    class Blind(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return 0

    def counts(receipt: transform.Fp8Products) -> None:
        receipt._products = Blind(dict.fromkeys(transform.KINDS, 0))

    with (
        mock.patch.object(transform, "ROLES", roles),
        mock.patch.object(transform.Fp8Products, "__init__", counts),
        pytest.raises(SwitchDidNothing, match=f"0 {kind}"),
    ):
        train("fp8-llama", False, f"{STEPS} --fp8-recipe rowwise")


def test_a_run_without_the_conversion_ends() -> None:
    with mock.patch.object(transform, "multiply_in_fp8", _forget), pytest.raises(SwitchDidNothing, match="0 forward"):
        train("fp8-llama", False, f"{STEPS} --fp8-recipe rowwise")


def _gathered_in_bf16(workers: Any) -> str:
    """Train, but do not give torch the shorter form of the weights."""
    with (
        mock.patch("rapidformer_templates.switches.fsdp.engine.FSDPEngine._extend_gathering"),
        pytest.raises(SwitchDidNothing) as ended,
    ):
        train("fp8-llama", False, f"{STEPS} --fp8-recipe tensorwise --fp8-all-gather --fsdp-memory-optimization")
    return str(ended.value)


@pytest.mark.distributed
def test_weights_that_are_gathered_in_bf16_end_the_run() -> None:
    assert all("weights gathered in fp8 were expected" in said for said in run_in_workers(2, _gathered_in_bf16))


class _Mortal(Fp8Llama):
    dies_after = 0

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        if step == self.dies_after:
            raise Died


def _run(folder: Path, flags: str, *more: str, dies_after: int = 0) -> list[float]:
    """Train, and return the losses."""
    job = _Mortal([*f"{STEPS} {flags} --lr 1e-3 --save-interval 3".split(), *more], save=str(folder), no_save=False)
    job.dies_after = dies_after
    with pytest.raises(Died) if dies_after else contextlib.nullcontext():
        job.fit()
    return [loss for loss, _ in job.curve]


def test_a_run_resumes_with_the_switch_and_without_and_exports_its_weights(tmp_path: Path) -> None:
    """Stored weights have their full precision: only the products are rounded."""
    fp8 = "--fp8-recipe rowwise"
    whole = _run(tmp_path / "whole", fp8)
    _run(tmp_path / "with", fp8, dies_after=4)
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    assert _run(tmp_path / "with", fp8, "--resume") == whole[3:]
    without = _run(tmp_path / "without", "--no-fp8-emulate", "--resume")
    assert without != whole[3:]
    assert_close(without, whole[3:], rtol=0.01, atol=0)
    files = (tmp_path / "whole/checkpoints/step-6").glob("weights-*.safetensors")
    written = {name: weight for file in files for name, weight in load_file(file).items()}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/export", dtype=torch.float32)
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, written[name])
    assert any(weight.bfloat16().float().ne(weight).any() for weight in written.values())


def test_the_planner_expects_faster_products_and_a_shorter_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --auto-strategy --json --task pretraining --model-type llama --num-layers 4 --hidden-size 4096"
    command += " --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --world-size 8"
    command += " --device-kind h100-80gb --mixed-precision bf16 --fsdp-memory-optimization --no-search-cache"
    found = []
    for words in ("", "--fp8-recipe tensorwise", "--fp8-recipe tensorwise --fp8-all-gather"):
        assert main([*command.split(), *words.split()]) == 0
        plan = json.loads(capsys.readouterr().out)
        layouts = {layout["flags"]: layout["step_seconds"] for layout in plan["layouts"] if layout["tensor"] == 1}
        found.append(min(layouts.values()))
    bf16, fp8, gathered = found
    assert 1.05 < bf16 / fp8 < 2
    assert gathered < fp8
