"""Attention over whole sequences that are divided over workers: with all-to-all over the heads, or in a ring.

All-to-all is DeepSpeed-Ulysses (Jacobs et al., 2023). Each worker sends the queries, keys and values of some heads to
each other worker, and receives the whole sequence for its own heads. Afterwards, the results are sent back. So the
attention itself is the model's, with its kernel and its mask of the whole sequence.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.layout.collectives import all_to_all
from rapidformer_templates.switches.layout.ring_attention import AttentionMask, ring_attention
from rapidformer_templates.switches.layout.sequence_shards import ContextSequenceShards

SUFFIX = "_over_context"
OTHER_WAYS = "divide the model instead, with --tensor-model-parallel-size or --pipeline-model-parallel-size"

HEADS, TOKENS = 1, 2
"""Dimensions of queries, keys and values: (samples, heads, tokens, size of a head)."""

_numbers = itertools.count()


def attend_over_context(model: PreTrainedModel, shards: ContextSequenceShards) -> None:
    """Let the attention of the blocks see whole sequences."""
    inner = _attention_name(model)
    name = f"{inner}{SUFFIX}_{next(_numbers)}"  # another model of this process has other shards
    AttentionInterface.register(name, partial(attention, shards=shards, inner=inner))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner])
    model.set_attn_implementation(name)


def _attention_name(model: PreTrainedModel) -> str:
    """Return transformers' name of the attention to divide."""
    name: str = model.config._attn_implementation.partition(SUFFIX)[0]
    return "sdpa" if name == "eager" else name  # the same result, but eager attention also returns its weights


def check_attention(model: PreTrainedModel) -> None:
    """Check that the attention of a model can be divided.

    Raises:
        ModelError: the implementation of the attention cannot be replaced.
    """
    name = _attention_name(model)
    chosen = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    fixed = [
        type(part).__name__ for part in chosen if not (part._supports_sdpa and part._can_set_attn_implementation())
    ]
    if fixed or "flash" in name or name not in ALL_ATTENTION_FUNCTIONS or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ModelError(
            f"the attention of {fixed[0] if fixed else type(model).__name__} cannot be divided",
            where="--context-parallel-size",
            hint=OTHER_WAYS if fixed else "build the model with sdpa attention (attn_implementation)",
        )


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    shards: ContextSequenceShards,
    inner: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with transformers' signature.

    Args:
        module: the attention layer.
        query: queries of this worker's part of the sequence, shape (samples, heads, tokens, size of a head). ``key``
            and ``value`` may have fewer heads.
        attention_mask: mask of whole sequences.
        shards: the shards of the model's sequences.
        inner: transformers' name of the attention to divide.

    Returns:
        (output of shape (samples, tokens, heads, size of a head), the attention's other output).

    Raises:
        ModelError: the number of heads is not divisible.
    """
    within = ALL_ATTENTION_FUNCTIONS[inner]
    if shards.length is None:
        return within(module, query, key, value, attention_mask, *args, **kwargs)
    shards.attended = True
    if shards.kind == "ring":
        return _attend_in_ring(module, shards, query, key, value, attention_mask, *args, **kwargs), None
    peers, length = shards.peers, shards.length
    repeats = repeats_of(query.shape[HEADS], key.shape[HEADS], peers.size)
    if not repeats:
        raise ModelError(
            f"{query.shape[HEADS]} attention heads of a worker cannot be divided among {peers.size}",
            where="--context-parallel-kind all-to-all",
            hint="use a ring, or a size that divides the heads",
        )
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, HEADS) for x in (key, value))
    whole = [all_to_all(x, peers, split_dim=HEADS, concat_dim=TOKENS)[:, :, :length] for x in (query, key, value)]
    output, others = within(_RepeatedHeads(module, repeats), *whole, attention_mask, *args, **kwargs)
    missing = query.shape[TOKENS] * peers.size - length
    if missing:
        output = nn.functional.pad(output, (0, 0, 0, 0, 0, missing))
    return all_to_all(output, peers, split_dim=1, concat_dim=2), others


def _attend_in_ring(
    module: nn.Module,
    shards: ContextSequenceShards,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> torch.Tensor:
    """Return the output for this worker's part of the sequence, of shape (samples, tokens, heads, size of a head)."""
    unsupported = sorted(name for name in NOT_IN_A_RING if others.get(name) is not None)
    if dropout:
        unsupported.append(f"dropout {dropout:g}")
    if mask is not None and mask.ndim != 4:
        unsupported.append("borders of packed documents")
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(unsupported)}, which ring attention does not support",
            where="--context-parallel-kind ring",
            hint="use all-to-all, with a size that divides the heads; for dropout, --dropout 0",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    assert shards.length is not None
    visible = AttentionMask(
        shards.intervals(shards.length),
        mask,
        causal=causal and mask is None,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return ring_attention(query, key, value, visible, shards.peers).transpose(1, 2)


NOT_IN_A_RING = ("position_bias", "softcap", "s_aux")
"""Arguments of the attention in some models that a ring does not support."""


def repeats_of(heads: int, key_heads: int, workers: int) -> int:
    """Return how often to repeat each key head so that all workers get the same number.

    0 if the heads do not divide.
    """
    if heads % workers:
        return 0
    times = range(1, heads // key_heads + 1)
    return next((n for n in times if key_heads * n % workers == 0 and heads % (key_heads * n) == 0), 0)


class _RepeatedHeads:
    """An attention layer with repeated key heads."""

    def __init__(self, module: nn.Module, repeats: int) -> None:
        self._module = module
        groups: int | None = getattr(module, "num_key_value_groups", None)
        if groups is not None:
            self.num_key_value_groups = groups // repeats

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)
