"""A small Llama and a GPT-2 whose matrices can be multiplied in fp8, also in two parts."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.support import jobs

LLAMA: dict[str, Any] = {
    "vocab_size": jobs.VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
PER_BLOCK = 7
"""Linear layers of a block."""


class Fp8Llama(jobs.CausalJob):
    """Keeps the batches of its steps."""

    def make(self) -> torch.nn.Module:
        return LlamaForCausalLM(LlamaConfig(**LLAMA))

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.batches = [*getattr(self, "batches", []), {name: part.clone() for name, part in batch.items()}]
        return super().compute_loss(model, batch)


class OddLlama(Fp8Llama):
    """The width of its feed-forwards is not a multiple of 16."""

    def make(self) -> torch.nn.Module:
        return LlamaForCausalLM(LlamaConfig(**{**LLAMA, "intermediate_size": 88}))


class Fp8Gpt2(jobs.CausalJob):
    """Its layers store their matrices the other way around."""

    def make(self) -> torch.nn.Module:
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"vocab_size": jobs.VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))


jobs.OTHERS |= {"fp8-llama": Fp8Llama, "odd-llama": OddLlama, "fp8-gpt2": Fp8Gpt2}
