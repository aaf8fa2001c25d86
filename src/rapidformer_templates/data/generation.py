"""Text generation with transformers' ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from rapidformer_templates.data.types import ModelOutputs

DEFAULT_NEW_TOKENS = 256
"""Maximum number of new tokens if the user gives none."""

SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
"""Sampling settings of a model. They have no effect on greedy decoding."""


@dataclass(frozen=True)
class Generation:
    """How texts are generated.

    Attributes:
        max_new_tokens: maximum per text. None uses the positions that the model has left, at most 256.
        temperature: 0 always takes the most likely token. Above 0 tokens are sampled, with more variety at higher
            values.
        seed: seed of the sampling.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 1234


class TrainedModel(Protocol):
    """A model of transformers that predicts rows. Only tasks that generate texts call ``generate``."""

    generation_config: GenerationConfig

    def __call__(self, **inputs: torch.Tensor) -> ModelOutputs: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def generate(self, **inputs: object) -> torch.Tensor: ...


def generate(
    model: TrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: Mapping[str, torch.Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    *,
    together: bool = False,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """Generate tokens for each row, shape (rows, tokens). Positions after the end of a text are padding.

    Args:
        batch: ``input_ids`` and ``attention_mask``. Prompts of a decoder are padded on the left, and are part of the
            result.
        new_tokens: maximum number of new tokens.
        temperature: see :class:`Generation`.
        together: all workers generate at the same time, and none may end before the others.
        streamer: receives the tokens as they are generated.
    """
    settings = copy.deepcopy(model.generation_config)
    # A text ends at the tokens that the model or the tokenizer names.
    of_model = settings.eos_token_id
    ends = {*(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id} - {None}
    if temperature == 0:
        settings.update(**dict.fromkeys(SAMPLING_SETTINGS))
    settings.update(
        do_sample=temperature > 0,
        temperature=temperature or None,
        num_beams=1,
        max_length=None,
        max_new_tokens=new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    # Workers with shards of the parameters must all run as many forwards as the slowest one.
    synced = together and dist.is_initialized() and dist.get_world_size() > 1
    return model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        generation_config=settings,
        synced_gpus=synced,
        streamer=streamer,
    )


def padded_left(rows: Sequence[np.ndarray], padding: int) -> dict[str, torch.Tensor]:
    """Collate prompts with padding on the left, so that all of them end at the last position."""
    length = max(map(len, rows))
    ids, mask = np.full((len(rows), length), padding), np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
