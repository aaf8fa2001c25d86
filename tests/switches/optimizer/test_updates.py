"""Each update rule compared with its formula, written in numpy in fp64, and Adam's options in every optimizer."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from rapidformer_templates.engines.optimizer_state import HostOptimizer, plain_tensors, state_tensors
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.models.blocks import tables_of
from rapidformer_templates.planning.deepspeed_file.settings import merge_file
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.optimizer.updates import AnyPrecisionAdamW, Lamb, Lion, Muon, rule_by_shape
from tests.support.jobs import CausalJob
from tests.support.parity import Trained, assert_follows, reference, train, trained
from tests.support.requests import CPU, config_of, on
from tests.support.selection import by_default

LR, DECAY, BETA1, BETA2, EPS = 0.01, 0.1, 0.9, 0.999, 1e-8
SHAPE = (64, 128)
Moments = Callable[[Any], tuple[np.ndarray, np.ndarray]]


def _torchao(state: Any) -> tuple[np.ndarray, np.ndarray]:
    return state["exp_avg"].dequantize().double().numpy(), state["exp_avg_sq"].dequantize().double().numpy()


def _bitsandbytes(state: Any) -> tuple[np.ndarray, np.ndarray]:
    def whole(number: int) -> np.ndarray:
        codes = state[f"qmap{number}"][state[f"state{number}"].long()].double()
        return (codes.view(-1, 256) * state[f"absmax{number}"][:, None].double()).view(SHAPE).numpy()

    return whole(1), whole(2)


def _anyprecision(state: Any) -> tuple[np.ndarray, np.ndarray]:
    return state["exp_avg"].double().numpy(), state["exp_avg_sq"].double().numpy()


Low = tuple[Moments, int, tuple[float, float]]
LOW: dict[str, Low] = {  # the moments, elements of a block, allowed errors as fractions of the largest in a block
    "adamw_anyprecision": (_anyprecision, 1, (2**-7, 2**-7)),
    "adamw_bnb_8bit": (_bitsandbytes, 256, (0.02, 0.02)),
    "adamw_torch_8bit": (_torchao, 256, (0.02, 0.02)),
    "adamw_torch_4bit": (_torchao, 128, (0.113, 0.0626)),
}


def _class(name: str) -> Any:
    facts = OPTIMIZERS[name]
    if facts.needs_package:
        pytest.importorskip(facts.needs_package)
    module, _, attribute = facts.implementation.path.rpartition(".")
    return getattr(import_module(module), attribute)


@pytest.mark.parametrize("name", LOW)
def test_each_step_is_adamw_of_the_moments_that_are_kept(name: str) -> None:
    """The update of a step is exact. Only the stored moments are rounded."""
    kind, (moments, block, allowed) = _class(name), LOW[name]
    draw = np.random.default_rng(0)
    weight = nn.Parameter(torch.tensor(draw.normal(size=SHAPE), dtype=torch.float32))
    optimizer = kind([weight], lr=LR, weight_decay=DECAY)
    first, second = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(1, 9):
        before, gradient = weight.detach().double().numpy(), draw.normal(size=SHAPE)
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient**2
        ratio = (first / (1 - BETA1**step)) / (np.sqrt(second / (1 - BETA2**step)) + EPS)
        expected = before * (1 - LR * DECAY) - LR * ratio
        # bitsandbytes decays after the step, not before. The difference is a product of two small numbers.
        moved = weight.detach().double().numpy()
        np.testing.assert_allclose(moved, expected, atol=LR * LR * DECAY * np.abs(ratio).max() + 1e-6)
        kept = moments(optimizer.state[weight])
        for actual, exact, share in zip(kept, (first, second), allowed, strict=True):
            largest = np.repeat(np.abs(exact.reshape(-1, block)).max(1), block).reshape(SHAPE)
            assert (np.abs(actual - exact) <= share * largest).all()
        first, second = kept


def test_second_moment_in_bfloat16_decays_as_in_fp64() -> None:
    """Rounding to nearest would freeze it: a step changes less than half of its last bit."""
    weight = nn.Parameter(torch.zeros(512))
    optimizer = AnyPrecisionAdamW([weight], lr=0.0, weight_decay=0.0)
    scales = torch.logspace(-3, 3, 512)
    for scale, steps in ((1.0, 300), (0.1, 2000)):
        for _ in range(steps):
            weight.grad = scales * scale
            optimizer.step()
    exact = scales.double() ** 2 * ((1 - BETA2**300) * BETA2**2000 + 0.01 * (1 - BETA2**2000))
    ratio = optimizer.state[weight]["exp_avg_sq"].double() / exact
    assert (ratio - 1).abs().max() < 0.05
    assert (ratio - 1).mean().abs() < 0.01  # rounding to nearest leaves it 4 times too large


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kahan_summation_keeps_what_16_bits_would_lose(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = AnyPrecisionAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(500):  # each step is a fraction of the last bit of 1
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), torch.full((64,), 0.95).double(), atol=2**-8, rtol=0)
    assert sum(t.nbytes for t in state_tensors(optimizer) if t.ndim) == 6 * 64


def _orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Return five steps of Muon's orthogonalization, in fp64."""
    matrix = matrix / np.linalg.norm(matrix)
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_muon_follows_its_formula(shape: tuple[int, int]) -> None:
    draw = np.random.default_rng(0)
    weight = draw.normal(size=shape)
    matrix, bias = nn.Parameter(torch.tensor(weight)), nn.Parameter(torch.ones(4, dtype=torch.float64))
    other = nn.Parameter(torch.ones(4, dtype=torch.float64))
    groups = [{"params": [matrix]}, {"params": [bias], "rule": "adamw", "weight_decay": 0.0}]
    optimizer = Muon(groups, lr=LR, weight_decay=DECAY)
    adamw = torch.optim.AdamW([other], lr=LR, weight_decay=0.0)
    momentum = np.zeros(shape)
    for _ in range(6):
        gradient = draw.normal(size=shape)
        matrix.grad = torch.tensor(gradient)
        bias.grad = other.grad = torch.tensor(draw.normal(size=4))
        optimizer.step()
        adamw.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = _orthogonal(0.95 * momentum + 0.05 * gradient)
        step = LR * 0.2 * np.sqrt(48) * direction
        weight = weight * (1 - LR * DECAY) - step
        error = np.abs(matrix.detach().numpy() - weight).max()
        assert error < 0.02 * np.abs(step).max() * 6  # torch iterates in bfloat16
        assert torch.equal(bias, other)


def test_tables_and_vectors_go_to_adamw() -> None:
    small = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(**small, tie_word_embeddings=False))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertForMaskedLM(BertConfig(vocab_size=32, **sizes))
    tables = {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}
    assert tables_of(gpt2) == tables
    rule = rule_by_shape(tables_of(gpt2))
    options = {name: rule(name, parameter) for name, parameter in gpt2.named_parameters()}
    by_muon = {name for name, given in options.items() if given["rule"] == "muon"}
    assert by_muon == {
        f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert options["transformer.ln_f.weight"] == {"weight_decay": 0.0, "rule": "adamw"}
    rule = rule_by_shape(tables_of(bert))
    by_muon = {n for n, p in bert.named_parameters() if rule(n, p)["rule"] == "muon"}
    assert "cls.predictions.transform.dense.weight" in by_muon
    assert not any("embeddings" in name or "decoder" in name for name in by_muon)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lion_follows_algorithm_2(dtype: torch.dtype) -> None:
    """In fp64 to the last digits. In fp32 the sign of a mix that is nearly zero may differ."""
    draw = np.random.default_rng(0)
    weight, momentum = draw.normal(size=SHAPE), np.zeros(SHAPE)
    parameter = nn.Parameter(torch.tensor(weight, dtype=dtype))
    optimizer = Lion([parameter], lr=LR, betas=(0.8, 0.95), weight_decay=DECAY)
    for _ in range(8):
        gradient = draw.normal(size=SHAPE)
        parameter.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
        weight = weight - LR * (np.sign(0.8 * momentum + 0.2 * gradient) + DECAY * weight)
        momentum = 0.95 * momentum + 0.05 * gradient
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(parameter.detach().double().numpy(), weight, atol=exact, rtol=0)
    np.testing.assert_allclose(optimizer.state[parameter]["exp_avg"].double().numpy(), momentum, atol=exact, rtol=0)


@pytest.mark.parametrize("name", [*LOW, "muon", "lion"])
def test_offloaded_state_makes_the_same_update(name: str) -> None:
    """The update is also the same after loading the state, as from a checkpoint."""
    kind, weights = _class(name), [nn.Parameter(torch.ones(SHAPE)) for _ in range(2)]
    recipe = OptimizerSpec(kind, {"lr": LR, "weight_decay": DECAY}, lambda name, parameter: {})
    plain, offloaded = (
        recipe.build([("w", weights[0])], {"w": {}}),
        HostOptimizer(recipe, [("w", weights[1])], {"w": {}}),
    )
    torch.manual_seed(0)
    for step in range(4):
        if step == 2:
            state = {key + part: t for key, v in offloaded.state[weights[1]].items() for part, t in _plain(v)}
            offloaded.load_state_dict({"state": {0: state}, "param_groups": offloaded.state_dict()["param_groups"]})
        gradient = torch.randn(SHAPE)
        for optimizer, weight in zip((plain, offloaded), weights, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(*weights)


def _plain(value: Any) -> Any:
    return plain_tensors(torch.as_tensor(value))


def test_lamb_follows_algorithm_2_in_fp64() -> None:
    """Compare with the update of the paper, written in numpy."""
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(4, 3))
    parameter = nn.Parameter(torch.tensor(weight))
    optimizer = Lamb([parameter], lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, 8):
        gradient = draw.normal(size=weight.shape)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        update = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-6) + 0.1 * weight
        weight = weight - 0.02 * np.linalg.norm(weight) / np.linalg.norm(update) * update
    np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)


def test_lamb_of_a_zero_weight_moves_it() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    Lamb([parameter], lr=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.1), rtol=1e-4, atol=0)


STEPS = "--train-iters 4 --global-batch-size 8 --log-interval 1 --no-export-model --lr 1e-2"
BETAS, EPSILON = (0.6, 0.95), 1e-3
DECAYS = f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]}"
ADAM = f"{DECAYS} --adam-epsilon {EPSILON}"
HERE = [
    name
    for name, facts in OPTIMIZERS.items()
    if facts.betas and not facts.needs_cuda and facts.needs_package in (None, *installed_packages())
]


class ByHook(CausalJob):
    """The reference: torch's class with its own arguments."""

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.01, "betas": BETAS, "eps": EPSILON})


@pytest.fixture(scope="module")
def by_hook() -> Trained:
    return trained(ByHook(f"{STEPS} --micro-batch-size 8".split()))


@pytest.mark.slow
def test_a_run_with_the_flags_is_torchs_with_its_options(by_hook: Trained) -> None:
    flags = f"{STEPS} --micro-batch-size 8 --optimizer adamw_torch"
    found = train("causal", False, f"{flags} {ADAM}", lr=None)
    assert_follows(found, by_hook, 0, 0)
    plain = reference("causal", False, flags, lr=None)
    assert abs(plain["curve"][-1][0] - by_hook["curve"][-1][0]) > 0.01  # nats


@pytest.mark.parametrize("name", by_default(["muon", "adamw_torch_4bit", "lion"], HERE))
def test_every_optimizer_that_has_them_takes_them(name: str) -> None:
    has_epsilon = OPTIMIZERS[name].epsilon is not None
    job = CausalJob(f"{STEPS} --micro-batch-size 8 --optimizer {name} {ADAM if has_epsilon else DECAYS}".split())
    seen: list[dict[str, Any]] = []

    def look() -> None:
        recipe, named = job.build_optimizer(), list(job.model.named_parameters())
        seen.extend(recipe.build(named, recipe.differences(named)).param_groups)

    job.on_train_start = look  # type: ignore[method-assign]
    job.fit()
    losses = [loss for loss, _ in job.curve]
    adam = [group for group in seen if group.get("rule") != "muon"]
    assert adam
    assert all(tuple(group["betas"]) == BETAS for group in adam)
    assert not has_epsilon or all(group["eps"] == EPSILON for group in adam)
    assert all(group["eps"] != EPSILON for group in seen if group.get("rule") == "muon")
    plain = reference("causal", False, f"{STEPS} --micro-batch-size 8 --optimizer {name}", lr=None)["curve"]
    assert losses[0] == plain[0][0]
    assert losses[-1] != plain[-1][0]


def test_one_beta_leaves_the_other_as_it_was() -> None:
    plan = resolve(config_of("--adam-beta2 0.95"), on(CPU, packages={}))
    assert plan.optimizer_options == {"betas": (0.9, 0.95)}
    assert resolve(config_of(""), CPU).optimizer_options == {}


@pytest.mark.slow
def test_a_resumed_run_takes_new_ones_and_keeps_the_moments(tmp_path: Path) -> None:
    """Compare with torch's class, whose groups change between two steps."""
    flags = f"{STEPS} --micro-batch-size 8 --optimizer adamw_torch"
    first = CausalJob([*flags.split(), "--save-interval", "2", "--save", str(tmp_path / "first")])
    first.fit()
    resumed = CausalJob(f"{flags} {ADAM} --load {tmp_path}/first/checkpoints/step-2".split())
    resumed.fit()

    class Midway(CausalJob):
        """The groups of torch's optimizer get the new values before the third step."""

        def on_step_end(self, step: int, result: Any) -> None:
            super().on_step_end(step, result)
            if step == 2:
                for group in self.optimizer.param_groups:
                    group.update(betas=BETAS, eps=EPSILON)

        def build_optimizer(self) -> OptimizerSpec:
            def make(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
                self.optimizer = torch.optim.AdamW(*arguments, **options)
                return self.optimizer

            return OptimizerSpec(make, {"lr": 1e-2, "weight_decay": 0.01})

    midway = Midway(f"{STEPS} --micro-batch-size 8".split())
    midway.fit()
    assert resumed.curve == midway.curve[2:]
    assert resumed.curve != first.curve[2:]


def test_auto_of_a_deepspeed_file_is_filled_from_the_flags(tmp_path: Path) -> None:
    def options(params: Mapping[str, Any], flags: str = "") -> Mapping[str, Any]:
        content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}}
        (tmp_path / "ds.json").write_text(json.dumps(content))
        asked = config_of(f"--deepspeed-config {tmp_path / 'ds.json'} {flags}")
        return resolve(merge_file(asked), on(CPU, packages={"deepspeed": "any"})).optimizer_options

    auto = {"betas": "auto", "eps": "auto"}
    assert options(auto) == {}
    assert options(auto, ADAM) == options({}, ADAM) == {"betas": BETAS, "eps": EPSILON}
    assert options({"betas": list(BETAS), "eps": EPSILON}) == {"betas": BETAS, "eps": EPSILON}
    assert options({"betas": list(BETAS), "eps": "auto"}, ADAM) == {"betas": BETAS, "eps": EPSILON}
