"""Layer-wise decay of the learning rate: the rate of each parameter. ``test_features_of_a_step.py`` has the engines.

The layers follow the forward: OPT declares its final norm before its blocks, DeBERTa its relative embeddings after.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates.engines.recipe import (
    FirstUses,
    OptimizerSpec,
    depth_of,
    depths_of,
    layerwise,
    undecayed,
)
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.environment import installed_packages
from tests.support.jobs import VOCABULARY, DeepJob
from tests.support.parity import Trained, assert_follows, trained
from tests.support.worker_pool import run_in_workers

DECAY, PEAK = 0.5, 1e-2
STEPS = f"--train-iters 4 --global-batch-size 8 --log-interval 1 --no-export-model --lr {PEAK}"
ON = f"--layerwise-lr-decay {DECAY}"
TWO = {
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization",
    "distributed": "--micro-batch-size 4 --use-distributed-optimizer",
}
if "deepspeed" in installed_packages():
    TWO["zero-3"] = "--micro-batch-size 4 --zero-3-memory-optimization"

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
T5 = {
    "decoder_start_token_id": 0,
    "vocab_size": 32,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_heads": 2,
    "num_layers": 3,
    "num_decoder_layers": 2,
}
BART = {
    "vocab_size": 32, "d_model": 8, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
LAYERS = {
    "gpt2": {
        "transformer.wte": 5, "transformer.wpe": 5, "transformer.h.0": 4, "transformer.h.3": 1, "transformer.ln_f": 0,
    },
    "bert": {
        "bert.embeddings.": 4, "bert.encoder.layer.0.": 3, "bert.encoder.layer.2.": 1, "bert.pooler.": 0,
        "classifier.": 0,
    },
    "llama": {"model.embed_tokens.": 4, "model.layers.1.": 2, "model.norm.": 0, "lm_head.": 0},
    "opt": {
        "model.decoder.embed": 4, "model.decoder.project_in.": 4, "model.decoder.layers.0.": 3,
        "model.decoder.layers.2.": 1, "model.decoder.final_layer_norm.": 0, "model.decoder.project_out.": 0,
    },
    "bart": {
        "model.shared.": 4, "model.encoder.embed_positions.": 4, "model.encoder.layernorm_embedding.": 4,
        "model.encoder.layers.0.": 3, "model.decoder.embed_positions.": 3, "model.decoder.layernorm_embedding.": 3,
        "model.decoder.layers.0.": 2, "model.decoder.layers.1.": 1,
    },
    "deberta": {
        "deberta.embeddings.": 4, "deberta.encoder.rel_embeddings.": 4, "deberta.encoder.LayerNorm.": 4,
        "deberta.encoder.layer.0.": 3, "deberta.encoder.layer.2.": 1, "classifier.": 0, "pooler.": 0,
    },
    "t5": {
        "shared.": 4, "encoder.block.0.": 3, "encoder.block.2.": 1, "encoder.final": 0, "decoder.block.0.": 2,
        "decoder.block.1.": 1, "decoder.final": 0,
    },
}  # fmt: skip


def models(name: str) -> nn.Module:
    if name == "gpt2":
        return DeepJob().make()
    if name == "bert":
        return BertForSequenceClassification(BertConfig(**SMALL))
    if name == "opt":
        return OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=8, max_position_embeddings=32))
    if name == "bart":
        return BartForConditionalGeneration(BartConfig(**BART))
    if name == "deberta":
        relative = {"relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"}
        attention = {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_biased_input": False}
        return DebertaV2ForSequenceClassification(DebertaV2Config(**SMALL, **relative, **attention))
    return LlamaForCausalLM(LlamaConfig(**SMALL)) if name == "llama" else T5ForConditionalGeneration(T5Config(**T5))


@pytest.mark.parametrize("name", LAYERS)
def test_the_power_of_each_parameter(name: str) -> None:
    model = models(name)
    ids = torch.arange(3, 7)[None]
    with FirstUses(model) as uses:
        model(input_ids=ids, **({"labels": ids} if name in ("bart", "t5") else {}))
    options = layerwise(depths_of(model, uses.names), DECAY, PEAK, undecayed)
    seen = set()
    for parameter_name, parameter in model.named_parameters():
        for part, power in LAYERS[name].items():
            if parameter_name.startswith(part):
                seen.add(part)
                found = options(parameter_name, parameter)
                assert found.get("lr", PEAK) == pytest.approx(PEAK * DECAY**power), parameter_name
                assert ("weight_decay" in found) == (parameter.ndim < 2 or "bias" in parameter_name)
    assert seen == set(LAYERS[name])


def test_an_adapter_has_the_depth_of_its_layer() -> None:
    """A parameter of the model itself is in the same module as all layers, so only its name decides."""
    model = DeepJob().make()
    model.transformer.scale = nn.Parameter(torch.ones(1))
    depths = depths_of(model, ["transformer.scale", "transformer.wte.weight", "transformer.h.0.ln_1.weight"])
    names = (
        "transformer.scale",
        "transformer.wte.lora_A.weight",
        "transformer.h.1.attn.lora_B.weight",
        "transformer.ln_f.bias",
    )
    assert [depth_of(name, depths) for name in names] == [5, 5, 3, 0]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="the model has no blocks that follow each other"):
        layerwise(depths_of(nn.Linear(2, 2)), DECAY, PEAK, undecayed)


class ByHand(DeepJob):
    """One parameter group per layer, as torch's own optimizer accepts them."""

    def build_optimizer(self) -> OptimizerSpec:
        def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
            powers = [power for part, power in LAYERS["gpt2"].items() if name.startswith(part)]
            if name.startswith("transformer.h."):
                powers = [4 - int(name.split(".")[2])]
            return {**undecayed(name, parameter), "lr": PEAK * DECAY ** powers[0]}

        return OptimizerSpec(torch.optim.AdamW, {"lr": PEAK, "weight_decay": 0.01}, options)


def run(job: type[DeepJob], flags: str) -> Trained:
    return trained(job(f"{STEPS} {flags}".split()))


@pytest.fixture(scope="module")
def wanted() -> Trained:
    return run(ByHand, "--micro-batch-size 8")


@pytest.mark.slow
def test_it_is_a_group_for_each_layer(wanted: Trained) -> None:
    found = run(DeepJob, f"{ON} --micro-batch-size 8 --optimizer adamw_torch")
    assert_follows(found, wanted, weights=(1e-4, 1e-5))
    plain = run(DeepJob, "--micro-batch-size 8 --optimizer adamw_torch")
    assert abs(plain["curve"][-1][0] - found["curve"][-1][0]) > 1e-3


class OptJob(DeepJob):
    """A model that declares its layers in another order than it uses them."""

    def make(self) -> nn.Module:
        sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32, "dropout": 0.0}
        return OPTForCausalLM(
            OPTConfig(**sizes, vocab_size=VOCABULARY, word_embed_proj_dim=8, max_position_embeddings=64)
        )


class OptByHand(OptJob):
    def build_optimizer(self) -> OptimizerSpec:
        def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
            powers = [power for part, power in LAYERS["opt"].items() if name.startswith(part)]
            if name.startswith("model.decoder.layers."):
                powers = [3 - int(name.split(".")[3])]
            return {**undecayed(name, parameter), "lr": PEAK * DECAY ** powers[0]}

        return OptimizerSpec(torch.optim.AdamW, {"lr": PEAK, "weight_decay": 0.01}, options)


def _opt(workers: Any) -> dict[str, Trained]:
    return {name: run(OptJob, f"{ON} {flags}") for name, flags in TWO.items()}


@pytest.mark.distributed
def test_two_workers_find_the_same_depths() -> None:
    """Under ZeRO-3, the parameters of the forward that finds it are partitioned."""
    wanted = run(OptByHand, "--micro-batch-size 8")
    for runs in run_in_workers(2, _opt):
        for found in runs.values():
            assert_follows(found, wanted, weights=(1e-4, 1e-5))
