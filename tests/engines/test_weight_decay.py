"""Weight decay reaches the parameters that transformers' ``Trainer`` decays, without those of one dimension."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers import Trainer as TransformersTrainer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.trainer_pt_utils import get_parameter_names

from rapidformer_templates.engines.recipe import undecayed
from rapidformer_templates.switches.mixture_of_experts.layer import Experts
from tests.support.architectures import SIZES
from tests.support.selection import by_default

FACTORIES: tuple[Any, ...] = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSeq2SeqLM,
)
LANGUAGE_MODELS = sorted(
    {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    & set(CONFIG_MAPPING)
)
BY_DEFAULT = ("gpt2", "llama", "gpt_oss", "t5", "xlnet", "bert", "roberta-prelayernorm", "zamba", "cohere")
SOME = {"cohere": {"use_qk_norm": True}}
"""Settings that add parameters: norms with a row for each head."""


def _on_meta(name: str) -> PreTrainedModel:
    """Return a model without memory, small if its sizes have the usual names."""
    sizes = {}
    with contextlib.suppress(Exception):  # sizes of layers that differ cannot be read
        default: Any = CONFIG_MAPPING[name]()
        named = {default.attribute_map.get(size, size): value for size, value in SIZES.items()}
        sizes = {size: value for size, value in named.items() if isinstance(getattr(default, size, None), int)}
    for factory in FACTORIES:
        for values in (sizes, {}):
            with contextlib.suppress(Exception), torch.device("meta"):
                model: PreTrainedModel = factory.from_config(CONFIG_MAPPING[name](**values, **SOME.get(name, {})))
                return model
    pytest.skip("it cannot be built from its configuration alone")


@pytest.mark.parametrize("name", by_default(BY_DEFAULT, LANGUAGE_MODELS))
def test_decayed_parameters_are_those_of_transformers(name: str) -> None:
    """transformers also leaves out matrices inside of a module that is named like a norm. We decay those."""
    model = _on_meta(name)
    named = dict(model.named_parameters())
    decayed = {key for key, parameter in named.items() if not undecayed(key, parameter)}
    theirs = set(TransformersTrainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    inside_norms = {key for key in get_parameter_names(model, [nn.LayerNorm], ["bias"]) if not _is_of_norm(key)}
    assert decayed == {key for key in theirs | inside_norms if key in named and named[key].ndim > 1}


def _is_of_norm(key: str) -> bool:
    """Return whether the module that has a parameter itself is called a norm."""
    return "norm" in key.rpartition(".")[0].rpartition(".")[-1]


def test_biases_of_our_experts_do_not_decay() -> None:
    experts = Experts(4, 8, 16, torch.tanh, gated=True, bias=True)
    decayed = {name for name, parameter in experts.named_parameters() if not undecayed(f"mlp.{name}", parameter)}
    assert decayed == {"up", "gate", "down"}
