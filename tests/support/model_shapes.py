"""Small models of the common architectures, with real tensors or as shapes only."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes

TOKENS, LENGTH = 128, 32
COMMON: dict[str, Any] = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(blocks: int) -> Any:
    sizes = transformers.GPT2Config(n_embd=32, n_layer=blocks, n_head=4, n_positions=LENGTH, use_cache=False, **COMMON)
    return transformers.GPT2LMHeadModel(sizes).train()


def llama(blocks: int) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        num_hidden_layers=blocks, num_attention_heads=4, use_cache=False, **sizes, **COMMON
    )
    return transformers.LlamaForCausalLM(config).train()


def bert(blocks: int) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(num_hidden_layers=blocks, vocab_size=TOKENS, **sizes)
    ).train()


def gpt_neox(blocks: int) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "use_cache": False}
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(num_hidden_layers=blocks, **sizes, **COMMON)
    ).train()


def t5(blocks: int) -> Any:
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(
        num_layers=blocks, num_decoder_layers=blocks, vocab_size=TOKENS, use_cache=False, **sizes
    )
    return transformers.T5ForConditionalGeneration(config).train()


MODELS: dict[str, Callable[[int], Any]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "gpt_neox": gpt_neox, "t5": t5}


def batch(samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros((samples, LENGTH), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def shapes(model: str, blocks: int = 5) -> ModelShapes:
    make = MODELS[model]
    return ModelShapes(lambda count: Assembly(make(blocks if count is None else count)), batch)
