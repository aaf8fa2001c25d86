"""Layer-wise decay of the learning rate: the rate of each parameter, which is the same under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates.engines.layerwise_rates import depths_of, layerwise
from rapidformer_templates.engines.recipe import OptimizerSpec, undecayed
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.environment import installed_packages
from tests.support.jobs import DeepJob
from tests.support.parity import Trained, trained
from tests.support.worker_pool import run_in_workers

DECAY, PEAK = 0.5, 1e-2
STEPS = f"--train-iters 4 --global-batch-size 8 --log-interval 1 --no-export-model --lr {PEAK}"
ON = f"--layerwise-lr-decay {DECAY}"
TWO = {
    "ddp": "--micro-batch-size 4",
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization",
    "distributed": "--micro-batch-size 4 --use-distributed-optimizer",
    "tensor": "--micro-batch-size 8 --tensor-model-parallel-size 2",
    "pipeline": "--micro-batch-size 4 --pipeline-model-parallel-size 2",
}
if "fairscale" in installed_packages():
    TWO["oss"] = "--micro-batch-size 4 --oss-memory-optimization"
if "deepspeed" in installed_packages():
    TWO |= {f"zero-{n}": f"--micro-batch-size 4 --zero-{n}-memory-optimization" for n in (1, 2, 3)}

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
T5 = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 3, "num_decoder_layers": 2}
LAYERS = {
    "gpt2": {
        "transformer.wte": 5, "transformer.wpe": 5, "transformer.h.0": 4, "transformer.h.3": 1, "transformer.ln_f": 0,
    },
    "bert": {
        "bert.embeddings.": 4, "bert.encoder.layer.0.": 3, "bert.encoder.layer.2.": 1, "bert.pooler.": 0,
        "classifier.": 0,
    },
    "llama": {"model.embed_tokens.": 4, "model.layers.1.": 2, "model.norm.": 0, "lm_head.": 0},
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
    return LlamaForCausalLM(LlamaConfig(**SMALL)) if name == "llama" else T5ForConditionalGeneration(T5Config(**T5))


@pytest.mark.parametrize("name", LAYERS)
def test_the_power_of_each_parameter(name: str) -> None:
    model = models(name)
    options = layerwise(depths_of(model), DECAY, PEAK, undecayed)
    seen = set()
    for parameter_name, parameter in model.named_parameters():
        for part, power in LAYERS[name].items():
            if parameter_name.startswith(part):
                seen.add(part)
                found = options(parameter_name, parameter)
                assert found.get("lr", PEAK) == pytest.approx(PEAK * DECAY**power), parameter_name
                assert ("weight_decay" in found) == (parameter.ndim < 2)
    assert seen == set(LAYERS[name])


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


def assert_follows(found: Trained, wanted: Trained) -> None:
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=1e-5, atol=1e-6)
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_is_a_group_for_each_layer(wanted: Trained) -> None:
    found = run(DeepJob, f"{ON} --micro-batch-size 8 --optimizer adamw_torch")
    assert_follows(found, wanted)
    plain = run(DeepJob, "--micro-batch-size 8 --optimizer adamw_torch")
    assert abs(plain["curve"][-1][0] - found["curve"][-1][0]) > 1e-3


def _all(workers: Any) -> dict[str, Trained]:
    return {name: run(DeepJob, f"{ON} {flags}") for name, flags in TWO.items()}


@pytest.mark.distributed
def test_two_workers_follow_one(wanted: Trained) -> None:
    for runs in run_in_workers(2, _all):
        for found in runs.values():
            assert_follows(found, wanted)
