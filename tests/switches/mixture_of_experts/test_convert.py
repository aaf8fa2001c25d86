"""Feed-forwards of transformers' architectures are found, replaced and initialized, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.mixture_of_experts.transform import (
    FeedForward,
    MixtureSizes,
    find_feed_forward,
    make_sparse,
    sparse_layers,
)
from tests.support.messages import Says

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
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _model(kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **{**TOKENS, **SIZES.get(kind, {}), **sizes}))


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
