"""What a forward is told about its batch: noise on the embeddings by sample, and answers about masks and positions.

It also knows whether the samples count, and whether the loss has gathered rows of other workers.

**NEFTune** (Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023) adds noise to the input
embeddings in training. The noise is a function of the seed, the position of the sample in the order of the run, the
index of the token in the sample, and the feature. It uses no random generator. So it is the same on every device, in
every layout, and for any micro batch and padding, and a resumed run adds the same noise as an uninterrupted one.

**Masks and positions.** A model of transformers without a mask checks whether its positions restart (packed sequences),
and a model with a mask checks whether anything is masked. On a GPU each check reads a tensor, and so waits until the
device has finished all earlier work. The host has created the batch, and has inspected it before copying it to the
device. It has inspected one tensor of the batch, but a user's hook may pass anything to the model. So the answer is
only used for that same tensor: the same memory, unmodified since. For any other mask, and for positions that are
neither those of the batch nor the model's defaults, transformers runs its own check, which is correct but slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

from rapidformer_templates.data.loader import MicroBatch, field_of
from rapidformer_templates.data.order import Stream
from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import ModelError
from rapidformer_templates.system.replaced_functions import Answer, patch_function

FLAG = "--neftune-alpha"
MASK, POSITIONS = "attention_mask", "position_ids"


class _CurrentBatch:
    """The micro batch that the model is processing.

    Attributes:
        positions: for each row, the position of its sample in the order. Negative for rows without a sample.
        mask: (rows, tokens), zero for padding. None without a mask.
        is_noisy: whether noise has been added to the embeddings.
        is_idle: the batch only keeps this worker in step with the others.
        is_gathered: other workers wait for the backward of the loss, because they have rows of this batch.
        answers: whether transformers gets the host's answers about masks and positions.
        derived_masks: masks that transformers derived from the inspected one, with the host's answer.
        with_positions: for each nested model call, whether it received positions.
    """

    def __init__(self, microbatch: MicroBatch, batch: Batch, *, answers: bool) -> None:
        self.positions = microbatch.positions
        self.mask = field_of(batch, MASK)
        self.is_noisy = False
        self.is_idle = microbatch.idle
        self.is_gathered = False
        self.answers = answers
        self.derived_masks: list[tuple[torch.Tensor, bool]] = []
        self.with_positions: list[bool] = []
        self._inspected: dict[str, tuple[torch.Tensor, int, bool]] = {}  # each with its version and the answer
        for name, answer in microbatch.mask_facts.items() if answers else ():
            tensor = field_of(batch, name)
            if tensor is not None:
                self._inspected[name] = tensor, tensor._version, answer

    def answer_for(self, name: str, tensor: torch.Tensor) -> bool | None:
        """Return the host's answer about a tensor, or None if the host has not inspected its values.

        A tensor has inspected values if it is that tensor, or a view of all of it.
        """
        if name not in self._inspected:
            return None
        own, version, answer = self._inspected[name]
        is_on_same = (tensor.dtype, tensor.device.type) == (own.dtype, own.device.type) and own.device.type != "meta"
        return answer if own._version == version and (tensor is own or (is_on_same and tensor.is_set_to(own))) else None


_current_batch: ContextVar[_CurrentBatch | None] = ContextVar("rows", default=None)


@contextmanager
def rows_of(microbatch: MicroBatch, batch: Batch, *, answers: bool = False) -> Iterator[None]:
    """Context for a forward on ``batch``, the device copy of ``microbatch``.

    Args:
        answers: whether a model that :func:`watch_positions` has prepared asks the host about masks and positions.
    """
    if answers:
        _patch_transformers()
    token = _current_batch.set(_CurrentBatch(microbatch, batch, answers=answers))
    try:
        yield
    finally:
        _current_batch.reset(token)


def has_samples() -> bool:
    """Whether a forward computes a micro batch whose samples count."""
    current = _current_batch.get()
    return current is not None and not current.is_idle


def note_gathered() -> bool:
    """Note that other workers get rows of the current micro batch. Returns whether its samples count."""
    current = _current_batch.get()
    if current is not None:
        current.is_gathered = True
    return current is None or not current.is_idle


def is_gathered() -> bool:
    """Whether other workers wait for the backward of the loss of the current micro batch."""
    current = _current_batch.get()
    return current is not None and current.is_gathered


def add_noise(model: nn.Module, alpha: float, seed: int) -> None:
    """Make the transformers model in ``model`` add noise to its input embeddings, only in training steps.

    For a sample with ``n`` tokens of ``d`` features, the noise is uniform within ± ``alpha / sqrt(n · d)``. Padding
    gets none. Without a mask, ``n`` is the length of the rows.

    Raises:
        ModelError: there is no such model, or it reads two sequences.
    """
    reader = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if reader is None or reader.config.is_encoder_decoder:
        message = f"{type(reader or model).__name__} is not a transformers model that reads one sequence"
        raise ModelError(message, where=FLAG, hint="leave it out")
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
        message = (
            f"the embeddings have {rows} rows × {tokens} tokens, but the batch has {len(current.positions)} "
            f"samples and a mask of {' × '.join(map(str, mask.shape))}"
        )
        raise ModelError(message, where=FLAG, hint="noise needs batches with one row per sample; leave it out")
    current.is_noisy = True
    share = uniform(keys_of(current.positions, seed).to(output.device, non_blocking=True), mask, features)
    lengths = mask.sum(dim=1).clamp(min=1)
    reach = alpha / (lengths * features).sqrt()
    return output + (share * reach[:, None, None]).to(output.dtype)


def _check(model: nn.Module, inputs: object, output: object) -> None:
    current = _current_batch.get()
    if current is not None and model.training and not current.is_noisy:
        message = f"{type(model).__name__} does not call its input embeddings"
        raise ModelError(message, where=FLAG, hint="give it input_ids")


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


def watch_positions(model: nn.Module) -> None:
    """Record, in each forward of a transformers model inside ``model``, whether it received positions."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            names = list(inspect.signature(part.forward).parameters)
            indices = [index for index, name in enumerate(names) if "position" in name]
            part.register_forward_pre_hook(partial(_enter_model, indices), with_kwargs=True)
            part.register_forward_hook(_leave_model, always_call=True)


def _enter_model(indices: list[int], model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    current = _inspected_batch()
    if current:
        named = any(value is not None for name, value in kwargs.items() if "position" in name)
        current.with_positions.append(named or any(args[i] is not None for i in indices if i < len(args)))


def _leave_model(model: nn.Module, args: object, output: object) -> None:
    current = _inspected_batch()
    if current:
        current.with_positions.pop()


def _inspected_batch() -> _CurrentBatch | None:
    """Return the current micro batch if there are answers about it. No graph may depend on those about one batch."""
    current = None if torch.compiler.is_compiling() else _current_batch.get()
    return current if current and current.answers else None


@cache
def _patch_transformers() -> None:
    patch_function(masking_utils, "_preprocess_mask_arguments", _record_mask)
    patch_function(masking_utils, "_ignore_causal_mask_sdpa", _causal_mask_suffices)
    patch_function(masking_utils, "_ignore_bidirectional_mask_sdpa", _nothing_is_masked)
    patch_function(masking_utils, "find_packed_sequence_indices", _packed_sequences)
    # A warning about padded batches without a mask. It reads the first and last token of each sample.
    warn = "warn_if_padding_and_no_attention_mask"
    patch_function(PreTrainedModel, warn, lambda check, *a, **k: None if _inspected_batch() else check(*a, **k))


def _record_mask(
    check: Answer, config: object, inputs: object, mask: object = None, *others: object, **more: object
) -> object:
    """Record the mask of bools that transformers derives from a mask before it checks it."""
    source = mask if mask is not None else more.get(MASK)
    result = check(config, inputs, *(() if MASK in more else (mask,)), *others, **more)
    current = _inspected_batch()
    if current and isinstance(source, torch.Tensor) and isinstance(result[1], torch.Tensor):
        full = current.answer_for(MASK, source)
        if full is not None:
            current.derived_masks.append((result[1], full))
    return result


def _is_full(mask: torch.Tensor | None) -> bool | None:
    """Return the host's answer about a derived mask, or None if there is no answer."""
    current = _inspected_batch()
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
    current = _inspected_batch()
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
