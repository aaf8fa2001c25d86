"""The width of a model, compared with its configuration and with its matrices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from rapidformer_templates.models.blocks import width_of

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 2, "vocab_size": 99},
    "llama": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    "bert": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    "t5": {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 2, "vocab_size": 99},
    "mixtral": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 99},
    "vit": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
}  # fmt: skip


def _model(kind: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModel.from_config(AutoConfig.for_model(kind, **SMALL[kind]))
    return model


@pytest.mark.parametrize("kind", SMALL)
def test_the_matrices_tell_the_width_that_the_configuration_states(kind: str) -> None:
    model = _model(kind)
    assert width_of(model) == 48
    bare = nn.ModuleList(model.children())
    assert not hasattr(bare, "config")
    assert width_of(bare) == 48


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (SimpleNamespace(hidden_size=7), 7),
        (SimpleNamespace(hidden_sizes=[5, 9, 6]), 9),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=8)), 8),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=(3, 4))), 4),
        (SimpleNamespace(hidden_size=None), 30),
        ({"hidden_size": 7}, 30),
    ],
)
def test_a_configuration_is_read_as_transformers_reads_it(config: Any, width: int) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(20, 50))
    model.config = config
    assert width_of(model) == width  # the matrices with size 30 have 1,800 elements, those with size 20 have 1,600


def test_of_two_sizes_the_smaller_one_and_without_a_matrix_one() -> None:
    assert width_of(nn.Linear(30, 20)) == 20
    assert width_of(nn.Conv2d(3, 8, 5)) == 1
    assert width_of(nn.Sequential(nn.Conv2d(3, 8, 5), nn.Linear(8, 10))) == 8
