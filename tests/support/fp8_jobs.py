"""A small Llama whose matrices can be multiplied in fp8, also in two parts, on rows of one length or of many."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import jobs

CONFIG: dict[str, Any] = {
    "vocab_size": jobs.VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama() -> LlamaForCausalLM:
    """Build the model from random values that are large enough to matter."""
    return LlamaForCausalLM(LlamaConfig(**CONFIG, initializer_range=0.1, bos_token_id=1, eos_token_id=2))


class LlamaJob(jobs.CausalJob):
    def make(self) -> torch.nn.Module:
        return llama()


jobs.OTHERS["llama"] = LlamaJob
