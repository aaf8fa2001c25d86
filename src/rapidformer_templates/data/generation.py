"""Texts that a model writes, by transformers' ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

DEFAULT_NEW_TOKENS = 256
"""At most so many, where nobody says how many."""

OF_DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
"""Settings of a model's own by which tokens are drawn; they mean nothing where none is."""


@dataclass(frozen=True)
class Generation:
    """How texts are generated.

    Attributes:
        max_new_tokens: of each text; None is as many as the model has positions for, at most 256.
        temperature: 0 takes the likeliest token each time; above it tokens are drawn, the more freely the higher it is.
        seed: of the draws.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 1234


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    batch: Mapping[str, torch.Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    *,
    together: bool = False,
    **arguments: Any,
) -> torch.Tensor:
    """Tokens of a text for each row, shape (rows, tokens); after its end, padding.

    Args:
        batch: ``input_ids`` and ``attention_mask``; prompts of a decoder are padded on the left, and stand in the
            result.
        new_tokens: at most so many are written.
        temperature: see :class:`Generation`.
        together: all workers generate at this moment, and none may end before the others.
        arguments: what else ``generate`` takes, such as a ``streamer``.
    """
    settings = copy.deepcopy(model.generation_config)
    if temperature == 0:
        settings.update(**dict.fromkeys(OF_DRAWING))
    settings.update(
        do_sample=temperature > 0,
        temperature=temperature or None,
        num_beams=1,
        max_length=None,
        max_new_tokens=new_tokens,
        eos_token_id=_ends(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    # Workers that hold shards of the parameters must all make as many forwards as the slowest.
    synced = together and dist.is_initialized() and dist.get_world_size() > 1
    tokens: torch.Tensor = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        generation_config=settings,
        synced_gpus=synced,
        **arguments,
    )
    return tokens


def _ends(model: Any, tokenizer: PreTrainedTokenizerFast) -> list[int] | None:
    """The tokens that end a text: the model's and the tokenizer's."""
    own = model.generation_config.eos_token_id
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
    return sorted(ends) or None


def padded_left(rows: Sequence[np.ndarray], padding: int) -> dict[str, torch.Tensor]:
    """Prompts as a batch that ends where each of them does."""
    length = max(map(len, rows))
    ids, mask = np.full((len(rows), length), padding), np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
