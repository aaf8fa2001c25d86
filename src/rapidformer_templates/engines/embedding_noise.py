"""NEFTune: noise on the input embeddings in training.

See Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023.

The noise is a function of the seed, the position of the sample in the order of the run, the index of the token in the
sample, and the feature. It uses no random generator. So it is the same on every device, in every layout, and for any
micro batch and padding, and a resumed run adds the same noise as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.data.loader import MicroBatch, field_of
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import ModelError

FLAG = "--neftune-alpha"


class _NoisyBatch:
    """The micro batch that the model is processing.

    Attributes:
        positions: for each row, the position of its sample in the order. Negative for rows without a sample.
        mask: (rows, tokens), zero for padding. None without a mask.
        is_noisy: whether noise has been added to the embeddings.
    """

    def __init__(self, microbatch: MicroBatch, batch: Batch) -> None:
        self.positions = microbatch.positions
        self.mask = field_of(batch, "attention_mask")
        self.is_noisy = False


_current_batch: ContextVar[_NoisyBatch | None] = ContextVar("rows", default=None)


@contextmanager
def rows_of(microbatch: MicroBatch, batch: Batch) -> Iterator[None]:
    """Context for a training forward on ``batch``, the device copy of ``microbatch``."""
    token = _current_batch.set(_NoisyBatch(microbatch, batch))
    try:
        yield
    finally:
        _current_batch.reset(token)


def add_noise(model: nn.Module, alpha: float, seed: int) -> None:
    """Make the transformers model in ``model`` add noise to its input embeddings, only in training steps.

    For a sample with ``n`` tokens of ``d`` features, the noise is uniform within ± ``alpha / sqrt(n · d)``. Padding
    gets none. Without a mask, ``n`` is the length of the rows.

    Raises:
        ModelError: there is no such model, or it reads two sequences.
    """
    reader = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if reader is None or reader.config.is_encoder_decoder:
        raise ModelError(
            f"{type(reader or model).__name__} is not a transformers model that reads one sequence",
            where=FLAG,
            hint="leave it out",
        )
    embeddings: Any = reader.get_input_embeddings()
    embeddings.register_forward_hook(partial(_add_noise, alpha, seed))
    reader.register_forward_hook(_check)


def _add_noise(alpha: float, seed: int, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
    current = _current_batch.get()
    if current is None or not module.training:
        return None  # an evaluation, or a forward outside a training step
    rows, tokens, features = output.shape
    mask = torch.ones(rows, tokens, device=output.device) if current.mask is None else current.mask
    if mask.shape != (rows, tokens) or len(current.positions) != rows:
        raise ModelError(
            f"the embeddings have {rows} rows × {tokens} tokens, but the batch has {len(current.positions)} "
            f"samples and a mask of {' × '.join(map(str, mask.shape))}",
            where=FLAG,
            hint="noise needs batches with one row per sample; leave it out",
        )
    current.is_noisy = True
    share = uniform(keys_of(current.positions, seed).to(output.device, non_blocking=True), mask, features)
    lengths = mask.sum(dim=1).clamp(min=1)
    reach = alpha / (lengths * features).sqrt()
    return output + (share * reach[:, None, None]).to(output.dtype)


def _check(model: nn.Module, inputs: object, output: object) -> None:
    current = _current_batch.get()
    if current is not None and model.training and not current.is_noisy:
        raise ModelError(
            f"{type(model).__name__} does not call its input embeddings", where=FLAG, hint="give it input_ids"
        )


def keys_of(positions: Sequence[int], seed: int) -> torch.Tensor:
    """Return two 32-bit numbers and a 1 for each row, (rows, 3). Zeros for rows without a sample."""
    keys = np.zeros((len(positions), 3), dtype=np.int32)
    for row, position in enumerate(positions):
        if position >= 0:
            keys[row, :2] = np.random.SeedSequence((seed, Stream.NOISE, position)).generate_state(2).view(np.int32)
            keys[row, 2] = 1
    return torch.from_numpy(keys)


def uniform(keys: torch.Tensor, mask: torch.Tensor, features: int) -> torch.Tensor:
    """Return uniform numbers between -1 and 1, (rows, tokens, features). Zeros for padding.

    Args:
        keys: the result of :func:`keys_of`.
        mask: (rows, tokens).
    """
    counts = (mask != 0).to(torch.int32)
    number = counts.cumsum(dim=1, dtype=torch.int32) - 1
    place = number[:, :, None] * features + torch.arange(features, dtype=torch.int32, device=mask.device)
    bits = _mixed(_mixed(place + keys[:, 0, None, None]) ^ keys[:, 1, None, None])
    # The centers of 2²³ intervals, which fp32 represents exactly.
    share = (_shifted(bits, 9).to(torch.float32) + 0.5) * 2.0**-22 - 1.0
    return share * (counts * keys[:, 2, None])[:, :, None]


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Permute 32-bit numbers. Each flipped input bit flips half of the output bits (Wellons' lowbias32)."""
    bits = (bits ^ _shifted(bits, 16)) * 0x7FEB352D
    bits = (bits ^ _shifted(bits, 15)) * (0x846CA68B - 2**32)
    return bits ^ _shifted(bits, 16)


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right and fill with zeros, which torch does not do for signed numbers."""
    return (bits >> places) & (2 ** (32 - places) - 1)
