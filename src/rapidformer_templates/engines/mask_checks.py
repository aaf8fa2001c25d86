"""What transformers' models ask of masks and positions in each forward, answered on the host.

A model that is given no mask looks whether its positions begin anew somewhere (packed sequences), and one that is
given a mask whether anything is masked. On a GPU each of these questions reads a tensor, and so waits until the
device has done everything before. The host knows the answers: it has made the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel, masking_utils

from rapidformer_templates.data.loader import MicroBatch


@contextmanager
def answered(microbatch: MicroBatch) -> Iterator[None]:
    """While the model runs over ``microbatch``; names that a version of transformers does not have are left out."""
    full = microbatch.size is not None and microbatch.size[1] == microbatch.padded_tokens
    checks: dict[str, Callable[[Any], Any]] = {"find_packed_sequence_indices": lambda check: _packed(microbatch)}
    if microbatch.size is not None:
        checks |= dict.fromkeys(
            ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"), lambda check: _unmasked(check, full)
        )
    there = {name: stand_in(getattr(masking_utils, name)) for name, stand_in in checks.items() if _has(name)}
    # A hint to users of padded batches without a mask; it reads the first and last token of each sample.
    hint = mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", return_value=None)
    with mock.patch.multiple(masking_utils, **there), hint:
        yield


def _has(name: str) -> bool:
    return callable(getattr(masking_utils, name, None))


def _packed(microbatch: MicroBatch) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Which packed sequence each token belongs to; None if the positions are the model's own, which are in a row."""
    has_positions = microbatch.field("position_ids") is not None

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not has_positions:
            return None
        first = position_ids[:, :1] - 1
        return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)

    return find


def _unmasked(check: Callable[..., bool], full: bool) -> Callable[..., bool]:
    """The check without a look at the padding mask: a full one is as none, any other is needed."""

    def ignore(padding_mask: torch.Tensor | None, *arguments: Any, **keywords: Any) -> bool:
        if padding_mask is not None and not full:
            return False
        return check(None, *arguments, **keywords)

    return ignore
