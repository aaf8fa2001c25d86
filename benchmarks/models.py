"""Helpers of several benchmarks: small models, and transformers' Trainer used as its documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def gpt2(layers: int, hidden: int, heads: int, vocabulary: int, length: int, dropout: float = 0.0, **more: Any) -> Any:
    """Build a GPT-2 of any size. ``more`` goes into its configuration."""
    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": length}
    dropouts: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    tokens: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, **tokens, **more))
    model.loss_type = "ForCausalLM"  # otherwise transformers warns that it guesses this value
    return model


def llama(layers: int, hidden: int, heads: int, vocabulary: int, length: int, **more: Any) -> Any:
    """Build a llama of any size. ``more`` goes into its configuration."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 8 * hidden // 3, "vocab_size": vocabulary, "max_position_embeddings": length}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False, **more}))


def trainer_arguments(folder: str | Path, **more: Any) -> transformers.TrainingArguments:
    """Return arguments for a silent transformers Trainer, by default on a CPU."""
    quiet: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": [], **more}
    return transformers.TrainingArguments(output_dir=str(folder), **quiet)


def callbacks(**hooks: Callable[[], None]) -> list[Any]:
    """Build callbacks of transformers' Trainer from functions by the name of the event: ``on_step_end=…``."""

    def method(hook: Callable[[], None]) -> Callable[..., None]:
        return lambda *unused, **also_unused: hook()

    methods = {name: method(hook) for name, hook in hooks.items()}
    return [type("Watch", (transformers.TrainerCallback,), methods)()]
