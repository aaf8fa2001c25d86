"""Attention over a whole sequence of which each worker has a stretch: all to all over the heads.

DeepSpeed-Ulysses (Jacobs et al., 2023): before attention each worker gives the queries, keys and values of some heads
to each other one and gets the whole sequence of its own heads; after it the results go back. So attention itself is
the model's, with its kernel and its mask of the whole sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.context_parallel.exchange import trade
from rapidformer_templates.switches.context_parallel.stretches import ContextShards

SUFFIX = "_over_context"
HEADS, TOKENS = 1, 2
"""Dimensions of queries, keys and values: (samples, heads, tokens, size of a head)."""


def attend_over_context(model: PreTrainedModel, shards: ContextShards) -> None:
    """Let the blocks' attention see whole sequences."""
    name = _inner(model)
    AttentionInterface.register(name + SUFFIX, partial(attention, inner=name))
    AttentionMaskInterface.register(name + SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(name + SUFFIX)
    for module in model.modules():
        module.context_shards = shards  # type: ignore[assignment]


def _inner(model: PreTrainedModel) -> str:
    """What transformers calls the attention that is to be divided."""
    name: str = model.config._attn_implementation.removesuffix(SUFFIX)
    return "sdpa" if name == "eager" else name  # the same numbers; eager attention has its weights beside them


def check_attention(model: PreTrainedModel) -> None:
    """Look whether the attention of a model can be divided.

    Raises:
        ModelError: it cannot be chosen from outside.
    """
    name = _inner(model)
    chosen = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    fixed = [
        type(part).__name__ for part in chosen if not (part._supports_sdpa and part._can_set_attn_implementation())
    ]
    if fixed or "flash" in name or name not in ALL_ATTENTION_FUNCTIONS or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ModelError(
            f"the attention of {fixed[0] if fixed else type(model).__name__} cannot be divided",
            where="--context-parallel-size",
            hint="leave it out for this model, or choose sdpa attention (attn_implementation)",
        )


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    inner: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: of this worker's stretch, shape (samples, heads, tokens, size of a head); ``key`` and ``value`` may
            have fewer heads.
        attention_mask: of whole sequences.
        inner: what transformers calls the attention that is divided.

    Returns:
        (shape (samples, tokens, heads, size of a head), what else the attention returns).

    Raises:
        ModelError: the heads do not divide.
    """
    shards: ContextShards | None = getattr(module, "context_shards", None)
    within = ALL_ATTENTION_FUNCTIONS[inner]
    if shards is None or shards.length is None:
        return within(module, query, key, value, attention_mask, *args, **kwargs)
    length, tokens, peers = shards.length, query.shape[TOKENS], shards.peers
    repeats = repeats_of(query.shape[HEADS], key.shape[HEADS], peers.size)
    if not repeats:
        raise ModelError(
            f"{query.shape[HEADS]} attention heads of a worker cannot be shared out among {peers.size}",
            where="--context-parallel-size",
            hint="choose a size that divides the heads, or the heads of each tensor-parallel worker",
        )
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, HEADS) for x in (key, value))
    whole = [trade(x, peers, given=HEADS, taken=TOKENS)[:, :, :length] for x in (query, key, value)]
    output, others = within(_Layer(module, repeats), *whole, attention_mask, *args, **kwargs)
    missing = tokens * peers.size - length
    if missing:
        output = nn.functional.pad(output, (0, 0, 0, 0, 0, missing))
    shards.attended += 1
    return trade(output, peers, given=1, taken=2), others


def repeats_of(heads: int, key_heads: int, workers: int) -> int:
    """How often each head of keys is given away so that all workers get as many; 0 if the heads do not divide."""
    if heads % workers:
        return 0
    times = range(1, heads // key_heads + 1)
    return next((n for n in times if key_heads * n % workers == 0 and heads % (key_heads * n) == 0), 0)


class _Layer:
    """An attention layer whose heads of keys were repeated."""

    def __init__(self, module: nn.Module, repeats: int) -> None:
        self._module = module
        if hasattr(module, "num_key_value_groups"):
            groups: Any = module.num_key_value_groups
            self.num_key_value_groups = groups // repeats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
