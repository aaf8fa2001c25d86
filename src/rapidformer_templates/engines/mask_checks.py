"""Answers on the host the questions that transformers models ask about masks and positions in each forward.

A model without a mask checks whether its positions restart (packed sequences), and a model with a mask checks whether
anything is masked. On a GPU each check reads a tensor, and so waits until the device has finished all earlier work. The
host has created the batch, and has inspected it before copying it to the device.

The host has inspected one tensor of the batch, but a user's hook may pass anything to the model. So the answer is only
used for that same tensor: the same memory, unmodified since. For any other mask, and for positions that are neither
those of the batch nor the model's defaults, transformers runs its own check, which is correct but slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

from rapidformer_templates.data.loader import MicroBatch, field_of
from rapidformer_templates.data.types import Batch
from rapidformer_templates.system.replaced_functions import Answer, patch_function

MASK, POSITIONS = "attention_mask", "position_ids"


class _InspectedTensor:
    """A tensor of the batch, and the host's answer about it."""

    def __init__(self, tensor: torch.Tensor, answer: bool) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self.answer = answer

    def has_values_of(self, other: torch.Tensor) -> bool:
        """Whether ``other`` has the inspected values: it is the same tensor, or a view of all of it."""
        same = other is self._tensor or (
            (other.dtype, other.device.type) == (self._tensor.dtype, self._tensor.device.type)
            and other.device.type != "meta"
            and other.is_set_to(self._tensor)
        )
        return same and self._tensor._version == self._version


class _InspectedBatch:
    """The micro batch that the model is processing.

    Attributes:
        derived_masks: masks that transformers derived from the inspected one, with the host's answer.
        with_positions: for each nested model call, whether it received positions.
    """

    def __init__(self, microbatch: MicroBatch, batch: Batch) -> None:
        self._inspected: dict[str, _InspectedTensor] = {}
        for name, answer in microbatch.mask_facts.items():
            tensor = field_of(batch, name)
            if tensor is not None:
                self._inspected[name] = _InspectedTensor(tensor, answer)
        self.derived_masks: list[tuple[torch.Tensor, bool]] = []
        self.with_positions: list[bool] = []

    def answer_for(self, name: str, tensor: torch.Tensor) -> bool | None:
        """Return the host's answer about a tensor, or None if the host has not inspected it."""
        inspected = self._inspected.get(name)
        return inspected.answer if inspected and inspected.has_values_of(tensor) else None


_batch_variable: ContextVar[_InspectedBatch | None] = ContextVar("micro batch", default=None)


@contextmanager
def mask_answers(microbatch: MicroBatch, batch: Batch) -> Iterator[None]:
    """Context for a forward of a :func:`watch_positions` model on ``batch``, the device copy of ``microbatch``."""
    _patch_transformers()
    token = _batch_variable.set(_InspectedBatch(microbatch, batch))
    try:
        yield
    finally:
        _batch_variable.reset(token)


def watch_positions(model: nn.Module) -> None:
    """Record, in each forward of a transformers model inside ``model``, whether it received positions."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            names = list(inspect.signature(part.forward).parameters)
            indices = [index for index, name in enumerate(names) if "position" in name]
            part.register_forward_pre_hook(partial(_enter_model, indices), with_kwargs=True)
            part.register_forward_hook(_leave_model, always_call=True)


def _enter_model(indices: list[int], model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    current = _current_batch()
    if current:
        named = any(value is not None for name, value in kwargs.items() if "position" in name)
        current.with_positions.append(named or any(args[i] is not None for i in indices if i < len(args)))


def _leave_model(model: nn.Module, args: object, output: object) -> None:
    current = _current_batch()
    if current:
        current.with_positions.pop()


def _current_batch() -> _InspectedBatch | None:
    """Return the current micro batch. None while a graph is compiled, because it must not depend on one batch."""
    return None if torch.compiler.is_compiling() else _batch_variable.get()


@cache
def _patch_transformers() -> None:
    patch_function(masking_utils, "_preprocess_mask_arguments", _record_mask)
    patch_function(masking_utils, "_ignore_causal_mask_sdpa", _causal_mask_suffices)
    patch_function(masking_utils, "_ignore_bidirectional_mask_sdpa", _nothing_is_masked)
    patch_function(masking_utils, "find_packed_sequence_indices", _packed_sequences)
    # A warning about padded batches without a mask. It reads the first and last token of each sample.
    patch_function(
        PreTrainedModel,
        "warn_if_padding_and_no_attention_mask",
        lambda check, *args, **more: None if _current_batch() else check(*args, **more),
    )


def _record_mask(
    check: Answer, config: object, inputs: object, mask: object = None, *others: object, **more: object
) -> object:
    """Record the mask of bools that transformers derives from a mask before it checks it."""
    source = mask if mask is not None else more.get(MASK)
    result = check(config, inputs, *(() if MASK in more else (mask,)), *others, **more)
    current = _current_batch()
    if current and isinstance(source, torch.Tensor) and isinstance(result[1], torch.Tensor):
        full = current.answer_for(MASK, source)
        if full is not None:
            current.derived_masks.append((result[1], full))
    return result


def _is_full(mask: torch.Tensor | None) -> bool | None:
    """Return the host's answer about a derived mask, or None if there is no answer."""
    current = _current_batch()
    return next((answer for derived, answer in current.derived_masks if derived is mask), None) if current else None


def _causal_mask_suffices(
    check: Answer, mask: torch.Tensor | None, q_length: int, kv_length: int, *others: object, **more: object
) -> object:
    """Whether the causal mask is sufficient: a full padding mask counts as none, any other mask is needed."""
    full = _is_full(mask)
    if mask is None or full is None or not mask.shape[-1] == kv_length == q_length:
        return check(mask, q_length, kv_length, *others, **more)
    return full and check(None, q_length, kv_length, *others, **more)


def _nothing_is_masked(
    check: Answer, mask: torch.Tensor | None, kv_length: int, *others: object, **more: object
) -> object:
    """Whether nothing is masked, so that every token sees every other one."""
    full = _is_full(mask)
    if mask is None or full is None or mask.shape[-1] != kv_length:
        return check(mask, kv_length, *others, **more)
    return full and check(None, kv_length, *others, **more)


def _packed_sequences(check: Answer, positions: torch.Tensor) -> torch.Tensor | None:
    """Return the packed sequence of each token. None if each row is a single sequence."""
    current = _current_batch()
    if current is None:
        return check(positions)
    in_rows = current.answer_for(POSITIONS, positions)
    has_own_positions = current.with_positions and not any(current.with_positions)  # 0, 1, 2 … in each row
    if in_rows is None and not has_own_positions:
        return check(positions)
    if in_rows is not False:
        return None
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
