"""Packed rows, models that accept them, and the losses and gradients of these models."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rapidformer_templates.data.collate import IGNORED, PackedRows, PadCollate, Ragged, TokenizedSamples

CAPACITY = 32


def _generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _samples(lengths: list[int], *, labels: bool = False, seed: int = 0) -> TokenizedSamples:
    draw = _generator(seed)
    ids = [draw.integers(2, 90, n) for n in lengths]
    fields: dict[str, Any] = {"input_ids": Ragged(ids)}
    if labels:  # some tokens are not targets
        fields["labels"] = Ragged(np.where(draw.random(len(row)) < 0.5, row, IGNORED) for row in ids)
    return TokenizedSamples(fields)


OPTIONS: dict[str, dict[str, Any]] = {
    # The windows are shorter than the samples, so they must count positions within a sample.
    "mistral": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "phi3": {"sliding_window": 4},
    "starcoder2": {"sliding_window": 4},
    "ministral": {"sliding_window": 4},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "vocab_size": 96, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def _model(kind: str) -> PreTrainedModel:
    default = CONFIG_MAPPING[kind]()
    names = dict(CONFIG_MAPPING[kind].attribute_map)
    values = {names.get(name, name): value for name, value in SIZES.items() if hasattr(default, name)}
    values |= {name: 0.0 for name, value in default.to_dict().items() if "drop" in name and isinstance(value, float)}
    values |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    values |= OPTIONS.get(kind, {})
    settings = CONFIG_MAPPING[kind](**values)
    settings.use_cache = False
    torch.manual_seed(0)
    # The fused experts do not support float64.
    model = AutoModelForCausalLM.from_config(settings, experts_implementation="eager").double()
    for parameter in model.parameters():  # with the usual small initialization, a leak would vanish in rounding errors
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def _packed_batch(samples: TokenizedSamples) -> dict[str, torch.Tensor]:
    packed = PackedRows(samples, CAPACITY, _generator(1))
    collate = PadCollate({"input_ids": 0, "labels": IGNORED, "position_ids": 0}, mask=False, length=CAPACITY)
    return collate([packed[row] for row in range(len(packed))])


def _gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients


def _loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum over the targets in float64. The loss of transformers is a mean in float32."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
