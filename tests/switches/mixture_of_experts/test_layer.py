"""Sparse layers compared with loops and with Mixtral, feed-forwards that become sparse, and mixtures as they come."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.errors import ModelError, RapidformerError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.models.model_files import OWN_EXPERTS
from rapidformer_templates.switches.mixture_of_experts.layer import (
    Experts,
    Gate,
    SparseFeedForward,
    choose,
    grouped_product,
    patch_native_experts,
)
from rapidformer_templates.switches.mixture_of_experts.losses import BalanceLosses, balance_loss, z_loss
from rapidformer_templates.switches.mixture_of_experts.transform import (
    FeedForward,
    MixtureSizes,
    find_feed_forward,
    load_mixture,
    make_sparse,
    sparse_layers,
)
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.mixtures import MixtralJob, balance_of, output_of, tiny
from tests.support.parity import trained
from tests.support.worker_pool import alone

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


def test_what_follows_changes_nothing_before_it() -> None:
    """A causal model must not see in the dropped choices which tokens follow."""
    torch.manual_seed(1)
    gate = Gate(8, 4, 2, capacity_factor=0.75)
    torch.nn.init.normal_(gate.weight)
    rows = torch.randn(2, 12, 8)
    other = torch.cat([rows[:, :7], torch.randn(2, 5, 8)], 1)
    first, second = (gate.route(gate(each), None)[2] for each in (rows, other))
    assert not first.all()
    assert torch.equal(first[:, :7], second[:, :7])


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


# Balance and z loss compared with their formulas, and how they enter the gradient.

LOGITS = torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 2
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]], dtype=torch.bool)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_is_the_formula(top_k: int) -> None:
    chosen = choose(LOGITS, top_k)[1]
    value = balance_loss(LOGITS, chosen, MASK)
    torch.testing.assert_close(value.tolist(), balance_of(LOGITS, top_k, MASK), rtol=1e-13, atol=0)


def test_z_loss_is_the_formula() -> None:
    expected = LOGITS.exp().sum(-1).log() ** 2
    torch.testing.assert_close(z_loss(LOGITS), expected, rtol=1e-13, atol=0)


def _micro_batch(rows: slice, *, idle: bool = False) -> MicroBatch:
    ids = torch.zeros(MASK[rows].shape, dtype=torch.long)
    return MicroBatch({"input_ids": ids, "attention_mask": MASK[rows].long()}, [0], idle=idle)


def _gradient(parts: list[MicroBatch], rows: list[slice], loss_scale: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the gradient of two layers' losses for the logits, and the reported values, for a batch in parts."""
    losses = BalanceLosses(2, 5, balance=0.3, z=0.02)
    logits = LOGITS.clone().requires_grad_()
    losses.begin_step(parts, alone())
    for part, cut in zip(parts, rows, strict=True):
        own, mask = logits[cut], MASK[cut]
        weights, chosen = choose(own, 2)
        total = torch.zeros((), dtype=torch.float64)
        for layer in range(2):
            total = total + losses.attach(weights, own, chosen, None, mask, layer).sum() * 0
        losses.follow(total, part, scale=8.0)
        (total * loss_scale).backward()  # as an engine with its own loss scale does
    return logits.grad, losses.results(alone())


@pytest.mark.parametrize("cuts", [[slice(0, 3)], [slice(0, 1), slice(1, 3)], [slice(0, 2), slice(2, 3)]])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(cuts: list[slice]) -> None:
    logits = LOGITS.clone().requires_grad_()
    real, tokens = MASK.double(), int(MASK.sum())
    balance = (balance_loss(logits, choose(LOGITS, 2)[1], MASK) * real.sum(1)).sum() / tokens
    z = (z_loss(logits) * real).sum() / tokens
    (2 * (0.3 * balance + 0.02 * z)).backward()  # two layers
    gradient, results = _gradient([_micro_batch(cut) for cut in cuts], cuts, loss_scale=4.0)
    torch.testing.assert_close(gradient, logits.grad * 8 * 4, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(float(results["balance_loss"]), balance.item(), rtol=1e-12, atol=0)
    torch.testing.assert_close(float(results["z_loss"]), z.item(), rtol=1e-12, atol=0)


def test_an_idle_batch_counts_for_nothing() -> None:
    cuts = [slice(0, 3), slice(0, 2)]
    idle, seen = _gradient([_micro_batch(cuts[0]), _micro_batch(cuts[1], idle=True)], cuts, 1.0)
    gradient, expected = _gradient([_micro_batch(cuts[0])], cuts[:1], 1.0)
    assert torch.equal(idle, gradient)
    assert seen == expected


def test_load_and_drops_are_counted() -> None:
    losses = BalanceLosses(1, 4, balance=0.0, z=0.0)
    logits = torch.zeros(1, 4, 4, requires_grad=True)
    chosen = torch.tensor([[[0], [0], [0], [1]]])
    kept = torch.tensor([[[True], [True], [False], [True]]])
    losses.attach(logits[..., :1], logits, chosen, kept, None, 0).sum().backward()
    results, receipts = losses.results(alone()), losses.receipts(alone())
    assert float(results["expert_load_max"]) == 3.0
    assert float(results["expert_load_min"]) == 0.0
    assert receipts["expert_load_by_layer"] == [[3.0, 1.0, 0.0, 0.0]]
    assert (receipts["dropped_choices"], receipts["dropped_share"]) == (1, 0.25)


def test_batches_without_tokens_are_refused(says: Says) -> None:
    losses = BalanceLosses(1, 4, balance=0.1, z=0.0)
    with says(RapidformerError):
        losses.begin_step([MicroBatch({"pixels": torch.zeros(2, 3)}, [0, 1])], alone())


GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2}
OTHER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
LLAMA = {**OTHER, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT, "resid_pdrop": 0.3},
    "gptj": {**GPT, "rotary_dim": 8},
    "gpt_neox": OTHER,
    "falcon": {k: v for k, v in OTHER.items() if k != "intermediate_size"},
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "phi": OTHER,
    "starcoder2": {**LLAMA, "residual_dropout": 0.3},
    "bert": OTHER,
    "roberta": OTHER,
}
SPECIAL = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _model(kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **{**SPECIAL, **SIZES.get(kind, {}), **sizes}))


def _parts(found: FeedForward | None) -> dict[str, Any]:
    """Return the linear layers of a dense feed-forward."""
    assert found is not None
    names = {"up": found.shape.up, "gate": found.shape.gate, "down": found.shape.down}
    return {name: found.module.get_submodule(path) for name, path in names.items() if path}


@pytest.mark.parametrize("kind", SIZES)
def test_one_expert_with_the_dense_weights_is_the_dense_model(kind: str) -> None:
    """With a single expert, the gate's weight is 1, and only the expert remains."""
    model = _model(kind).eval()
    ids = torch.randint(3, 100, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        blocks = find_blocks(model)
        dense = [find_feed_forward(block) for block in blocks.values()]
        parts = [_parts(found) for found in dense]
        make_sparse(model, blocks, MixtureSizes(1, 1))
        for (_, layer), old in zip(sparse_layers(model), parts, strict=True):
            for name, linear in old.items():
                turned = linear.weight if type(linear).__name__ == "Conv1D" else linear.weight.T
                getattr(layer.experts, name)[0].copy_(turned)
                if linear.bias is not None:
                    getattr(layer.experts, f"{name}_bias")[0].copy_(linear.bias)
        result = model.eval()(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(result[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "starcoder2"])
def test_dropout_behind_the_feed_forward_stays(kind: str) -> None:
    model = _model(kind)
    make_sparse(model, find_blocks(model), MixtureSizes(4, 2))
    assert [layer.dropout.p for _, layer in sparse_layers(model)] == [0.3, 0.3]  # type: ignore[union-attr]


def test_experts_begin_as_the_dense_one_did() -> None:
    model = _model("gpt2", n_embd=64)
    down = model.h[0].mlp.c_proj.weight
    deviation = float(down.detach().std())
    make_sparse(model, find_blocks(model), MixtureSizes(4, 2, width=96))
    _, layer = next(sparse_layers(model))
    assert layer.experts.down.shape == (4, 96, 64)
    spread = layer.experts.down.detach().std((1, 2))
    assert spread.unique().numel() == 4
    torch.testing.assert_close(spread, torch.full((4,), deviation), rtol=0.05, atol=0)
    assert not layer.experts.up_bias.any()  # type: ignore[union-attr]


def test_every_second_block() -> None:
    model = _model("gpt2", n_layer=4)
    losses = make_sparse(model, find_blocks(model), MixtureSizes(4, 2, interval=2))
    assert [name for name, _ in sparse_layers(model)] == ["h.1.mlp", "h.3.mlp"]
    assert losses.layers == 2


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("opt", {**OTHER, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("t5", {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 48}),
    ],
)
def test_what_cannot_be_replaced_is_refused(kind: str, sizes: dict[str, Any], says: Says) -> None:
    model = _model(kind, **sizes)
    model = model.decoder if kind == "opt" else model
    blocks = find_blocks(model)
    with says(ModelError):
        make_sparse(model, blocks, MixtureSizes(4, 2))


def test_a_model_of_your_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Module()
            self.mlp.fc1, self.mlp.act, self.mlp.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    model = nn.Sequential(Block(), Block())
    make_sparse(model, find_blocks(model), MixtureSizes(3, 2))
    assert [name for name, _ in sparse_layers(model)] == ["0.mlp", "1.mlp"]


IDS = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", sorted(OWN_EXPERTS))
def test_function_and_losses_are_those_of_transformers(kind: str) -> None:
    """For one layer and one sample, transformers' pooled formula equals the sum of ours."""
    model = tiny(kind, layers=1)
    outputs = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    balance = load_balancing_loss_func(outputs.router_logits, 4, 2)
    plain = model(input_ids=IDS, labels=IDS)
    expected = _gradients(model, plain.loss + 0.5 * balance)
    losses = patch_native_experts(model, balance=2 * 0.5, z=0.0)  # theirs is top-k times ours
    model.config.output_router_logits = False
    result = model(input_ids=IDS, labels=IDS)
    part = MicroBatch({"input_ids": IDS}, [0])
    losses.begin_step([part], alone())
    losses.follow(result.loss, part, 1.0)
    got = _gradients(model, result.loss)
    torch.testing.assert_close(result.loss, plain.loss, rtol=1e-6, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-7)
    assert float(losses.results(alone())["balance_loss"]) == pytest.approx(float(balance) / 2, rel=1e-5)


def test_mixed_precision_reaches_the_experts() -> None:
    """transformers' grouped products compute in the type of the weights and ignore autocast."""
    model = tiny("mixtral")
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        patch_native_experts(model, balance=0.0, z=0.0)
        activation = model.model.layers[0].mlp.experts.act_fn
        activation.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model(input_ids=IDS)
    assert seen == [torch.bfloat16]


def test_the_models_own_coefficient_is_the_default() -> None:
    model = tiny("mixtral")
    model.config.router_aux_loss_coef = 0.07
    assert patch_native_experts(model, balance=None, z=0.0).balance == 0.07
    assert model.config.output_router_logits is False


class RouterLossJob(MixtralJob):
    """The user's own mixture, whose loss includes the router loss of transformers."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.1
        return model


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--moe-loss-coeff 0.1"])
def test_a_router_loss_that_depends_on_the_micro_batch_is_noted(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = "--train-iters 2 --global-batch-size 8 --lr 1e-2"
    curves = [trained(RouterLossJob(f"{steps} --micro-batch-size {m} {flags}".split()))["curve"] for m in (8, 2)]
    noted = "MixtralForCausalLM adds a router loss per micro batch" in capsys.readouterr().err
    assert noted == (not flags)
    differ = abs(curves[0][-1][1] - curves[1][-1][1]) > 1e-4
    assert differ == noted


# Exports can be loaded, but not by code that would fill them with random numbers.

FLAGS = "--train-iters 1 --lr 1e-2 --micro-batch-size 2"


def test_a_converted_model_is_read_again(tmp_path: Path, says: Says) -> None:
    job = CausalJob([*FLAGS.split(), "--num-experts", "4", "--moe-layer-interval", "2", "--save", str(tmp_path)])
    job.fit()
    export = tmp_path / "export"
    with pytest.raises(ValueError, match="moe-gpt2"):
        AutoModelForCausalLM.from_pretrained(export)
    model = load_mixture(export)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, job.model.eval()(IDS).logits, rtol=1e-6, atol=1e-7)
    assert json.loads((export / "config.json").read_text())["num_experts"] == 4
    weights = load_file(export / "model.safetensors")
    name = next(name for name in weights if "experts" in name)
    save_file({other: weight for other, weight in weights.items() if other != name}, export / "model.safetensors")
    with says(ValueError):
        load_mixture(export)


def test_a_mixture_of_transformers_stays_one(tmp_path: Path) -> None:
    job = MixtralJob([*FLAGS.split(), "--moe-loss-coeff", "0.01", "--save", str(tmp_path)])
    job.fit()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert model.config._experts_implementation == "grouped_mm"
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, job.model.eval()(IDS).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="from_pretrained"):
        load_mixture(tmp_path / "export")
