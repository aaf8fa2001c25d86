"""Small models of any architecture that transformers can build."""

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from rapidformer_templates.models.architectures import dropout_rates, objective_of

BLOCKS = ("num_hidden_layers", "decoder_layers", "encoder_layers")
SIZES = {
    **dict.fromkeys(BLOCKS, 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings", "emb_dim"), 32),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 1,
    "floor_scale": 4,  # so that a few tokens reach what acts on far positions
    "attention_chunk_size": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOST_PARAMETERS = 10_000_000
IDS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def tiny(
    name: str, factory: Any = transformers.AutoModelForCausalLM, *, blocks: int = 2, may_skip: bool = True
) -> PreTrainedModel:
    """A small model without noise; the test is skipped for those that have other sizes or need other packages."""
    kind: Any = CONFIG_MAPPING[name]
    torch.manual_seed(0)
    try:
        default = kind()
        own = {
            dict(kind.attribute_map).get(size, size): value
            for size, value in (SIZES | dict.fromkeys(BLOCKS, blocks)).items()
        }
        values = {size: value for size, value in own.items() if isinstance(getattr(default, size, None), int | None)}
        values = {size: value for size, value in values.items() if hasattr(default, size)}
        decodes = objective_of(name) == "masked" or (hasattr(default, "is_decoder") and not default.is_encoder_decoder)
        config: PreTrainedConfig = kind(**values, **({"is_decoder": True} if decodes else {}))
        for name_of_rate in (*dropout_rates(config, 0.0), *(key for key in config.to_dict() if "jitter" in key)):
            setattr(config, name_of_rate, 0.0)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in factory.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            pytest.skip(f"{size:,} parameters")
        model: PreTrainedModel = factory.from_config(config).eval()
        model.config.use_cache = False
        with torch.no_grad():
            model(input_ids=IDS)
    except Exception as error:  # 190 architectures have 190 ways to be unlike the others
        if not may_skip:
            raise
        pytest.skip(f"{type(error).__name__}: {error}")
    return model
