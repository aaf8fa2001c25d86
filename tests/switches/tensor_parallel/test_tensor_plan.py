"""Tensor plans: modules that are divided, and modules that cannot be."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForSequenceClassification

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.layout.tensor_plan import check_sizes, tensor_plan_of
from rapidformer_templates.switches.layout.tensor_styles import KNOWN, PLANS, styles_in_transformers
from tests.support.messages import Says
from tests.support.requests import CPU, GPUS, codes
from tests.support.tensor_jobs import MODELS, shard_dims


def _meta(model: str, tied: bool = True) -> nn.Module:
    with torch.device("meta"):
        return MODELS[model](0.0, tied)


@pytest.mark.parametrize("model", MODELS)
def test_every_matrix_of_a_block_is_divided(model: str) -> None:
    """Without a plan, a rule of thumb: only norms, routers and biases after a sum are whole in a block."""
    dims = shard_dims(_meta(model))
    assert dims.keys() == dict(_meta(model).named_parameters()).keys()
    shapes = {name: p.ndim for name, p in _meta(model).named_parameters()}
    whole = {name for name, dim in dims.items() if dim is None and shapes[name] > 1}
    expected = ("position", "wpe", "token_type", "transform.dense", "lm_head.dense", "mlp.gate.weight")
    assert all(any(word in name for word in expected) for name in whole), whole


def test_a_classifier_has_no_divided_head() -> None:
    with torch.device("meta"):
        model = LlamaForSequenceClassification(
            LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
        )
    dims = shard_dims(model)
    assert dims["score.weight"] is None
    assert dims["model.embed_tokens.weight"] == 0


class Own(nn.Module):
    """A model from no library."""

    def __init__(self, plan: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))
        if plan is not None:
            self.tensor_plan = plan


def test_a_model_may_bring_its_own_plan() -> None:
    dims = shard_dims(Own({"layers.*.up": "colwise", "layers.*.down": "rowwise"}))
    assert (dims["layers.1.up.weight"], dims["layers.1.up.bias"]) == (0, 0)
    assert (dims["layers.1.down.weight"], dims["layers.1.down.bias"]) == (1, None)


def _bloom() -> nn.Module:
    with torch.device("meta"):
        return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))


def test_a_model_without_a_plan_that_can_be_followed_is_refused(says: Says) -> None:
    for model in (_bloom(), Own(), Own({"blocks.*.up": "colwise"}), Own({"layers.*.up": "diagonal"})):
        with says(ModelError):
            tensor_plan_of(model)
    assert not tensor_plan_of(Own({"layers.*": "colwise"})).divisions  # the style of a container divides nothing
    llama = _meta("llama")
    check_sizes(llama, tensor_plan_of(llama), 4)
    for workers in (3, 8):
        with says(ModelError):
            check_sizes(llama, tensor_plan_of(llama), workers)


@pytest.mark.parametrize(("kind", "styles"), [("llama", True), ("gpt_neox", True), ("bert", False), ("gpt2", False)])
def test_styles_are_read_without_importing_transformers(kind: str, styles: bool) -> None:
    assert styles_in_transformers("my-own-kind") is None
    found = styles_in_transformers(kind)
    assert found is not None
    assert bool(found) is styles
    assert found <= KNOWN


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt_neox", *PLANS])
def test_rules_accept_what_has_a_plan(kind: str) -> None:
    assert codes(f"--model-type {kind} --tensor-model-parallel-size 2", GPUS) == []


def test_key_value_heads_of_a_folder(tmp_path: Any) -> None:
    sizes = '{"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 51}'
    (tmp_path / "config.json").write_text(sizes)
    flags = f"--pretrained-model-name-or-path {tmp_path} --tensor-model-parallel-size 2"
    assert codes(flags, CPU) == ["RF010"]
    (tmp_path / "config.json").write_text(sizes.replace('heads": 1', 'heads": 2'))
    assert codes(flags, CPU) == []


def test_a_vision_language_folder_has_the_plan_and_heads_of_its_language_part(tmp_path: Any) -> None:
    flags = f"--pretrained-model-name-or-path {tmp_path} --tensor-model-parallel-size 2"
    for text, expected in (('"llama"', []), ('"bloom"', ["RF064"]), ('"llama", "num_key_value_heads": 1', ["RF010"])):
        config = f'{{"model_type": "llava", "text_config": {{"num_attention_heads": 8, "model_type": {text}}}}}'
        (tmp_path / "config.json").write_text(config)
        assert codes(flags, CPU) == expected
