"""What transformers' models ask of masks and positions in each forward, answered on the host where it knows.

A model that is given no mask looks whether its positions begin anew somewhere (packed sequences), and one that is
given a mask whether anything is masked. On a GPU each of these questions reads a tensor, and so waits until the
device has done everything before. The host has made the batch and looked at it before it left.

What the host has looked at is one tensor of the batch, and the model is given what a user's hook likes. So it
answers for that very tensor alone: the same memory, and nothing written to it since. Of any other mask, and of
any positions that are neither the batch's nor the model's own, transformers finds out itself: right, and slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

from rapidformer_templates.data.loader import MicroBatch, field_of
from rapidformer_templates.data.types import Batch
from rapidformer_templates.system.replaced_functions import Answer, install

MASK, POSITIONS = "attention_mask", "position_ids"


class _Seen:
    """A tensor of the batch, and what the host has seen in it."""

    def __init__(self, tensor: torch.Tensor, answer: bool) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self.answer = answer

    def is_that(self, other: torch.Tensor) -> bool:
        """Whether ``other`` holds the values that were looked at: the tensor itself, or a view of all of it."""
        same = other is self._tensor or (
            (other.dtype, other.device.type) == (self._tensor.dtype, self._tensor.device.type)
            and other.device.type != "meta"
            and other.is_set_to(self._tensor)
        )
        return same and self._tensor._version == self._version


class _Running:
    """The micro batch that the model runs over."""

    def __init__(self, microbatch: MicroBatch, batch: Batch) -> None:
        self._looked: dict[str, _Seen] = {}
        for name, answer in microbatch.looked.items():
            tensor = field_of(batch, name)
            if tensor is not None:
                self._looked[name] = _Seen(tensor, answer)
        self._made: list[tuple[torch.Tensor, bool]] = []  # masks that transformers has made of the one looked at
        self._given: list[bool] = []  # of each model that runs, one in the other: whether it was given positions

    def of(self, name: str, tensor: torch.Tensor) -> bool | None:
        """What the host has seen in a tensor; None if it has not looked at it."""
        seen = self._looked.get(name)
        return seen.answer if seen and seen.is_that(tensor) else None

    def keep_made(self, tensor: torch.Tensor, answer: bool) -> None:
        self._made.append((tensor, answer))

    def of_made(self, tensor: torch.Tensor) -> bool | None:
        return next((answer for made, answer in self._made if made is tensor), None)

    def enter(self, *, with_positions: bool) -> None:
        self._given.append(with_positions)

    def leave(self) -> None:
        self._given.pop()

    @property
    def has_own_positions(self) -> bool:
        """Whether a model makes its positions itself: 0, 1, 2 … in each row."""
        return bool(self._given) and not any(self._given)


_running: ContextVar[_Running | None] = ContextVar("micro batch", default=None)


@contextmanager
def answered(microbatch: MicroBatch, batch: Batch) -> Iterator[None]:
    """While a model of :func:`watch_positions` runs over ``batch``, which is ``microbatch``'s on the device."""
    _install()
    token = _running.set(_Running(microbatch, batch))
    try:
        yield
    finally:
        _running.reset(token)


def watch_positions(model: nn.Module) -> None:
    """Have the models of transformers in ``model`` tell, in each forward, whether they were given positions."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            names = list(inspect.signature(part.forward).parameters)
            indices = [index for index, name in enumerate(names) if "position" in name]
            part.register_forward_pre_hook(_Enters(indices), with_kwargs=True)
            part.register_forward_hook(_leaves, always_call=True)


class _Enters:
    """The hook before a model's forward; ``indices``: of its arguments that are positions."""

    def __init__(self, indices: list[int]) -> None:
        self._indices = indices

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = _now()
        if running:
            named = any(value is not None for name, value in kwargs.items() if "position" in name)
            running.enter(with_positions=named or any(args[i] is not None for i in self._indices if i < len(args)))


def _leaves(model: nn.Module, args: Any, output: Any) -> None:
    running = _now()
    if running:
        running.leave()


def _now() -> _Running | None:
    """The micro batch that runs; None while a graph is compiled, in which nothing may depend on one batch."""
    return None if torch.compiler.is_compiling() else _running.get()


@cache
def _install() -> None:
    install(masking_utils, "_preprocess_mask_arguments", _follow_mask)
    install(masking_utils, "_ignore_causal_mask_sdpa", _causal_alone)
    install(masking_utils, "_ignore_bidirectional_mask_sdpa", _sees_all)
    install(masking_utils, "find_packed_sequence_indices", _packed)
    # A hint to users of padded batches without a mask; it reads the first and last token of each sample.
    install(PreTrainedModel, "warn_if_padding_and_no_attention_mask", _hint)


def _follow_mask(check: Answer, config: Any, inputs: Any, mask: Any = None, *others: Any, **more: Any) -> Any:
    """Transformers turns a mask into one of bools before it asks of it."""
    given = mask if mask is not None else more.get(MASK)
    result = check(config, inputs, *(() if MASK in more else (mask,)), *others, **more)
    running = _now()
    if running and isinstance(given, torch.Tensor) and isinstance(result[1], torch.Tensor):
        full = running.of(MASK, given)
        if full is not None:
            running.keep_made(result[1], full)
    return result


def _causal_alone(check: Answer, mask: Any, q_length: int, kv_length: int, *others: Any, **more: Any) -> Any:
    """Whether the causal mask says all: a full padding mask is as none, any other is needed."""
    running = _now()
    full = running.of_made(mask) if running and mask is not None else None
    if full is None or not mask.shape[-1] == kv_length == q_length:
        return check(mask, q_length, kv_length, *others, **more)
    return full and check(None, q_length, kv_length, *others, **more)


def _sees_all(check: Answer, mask: Any, kv_length: int, *others: Any, **more: Any) -> Any:
    """Whether nothing is masked, where every token sees every other."""
    running = _now()
    full = running.of_made(mask) if running and mask is not None else None
    if full is None or mask.shape[-1] != kv_length:
        return check(mask, kv_length, *others, **more)
    return full and check(None, kv_length, *others, **more)


def _packed(check: Answer, positions: torch.Tensor) -> torch.Tensor | None:
    """Which packed sequence each token belongs to; None where each row is one."""
    running = _now()
    if running is None:
        return check(positions)
    in_rows = running.of(POSITIONS, positions)
    if in_rows is None and not running.has_own_positions:
        return check(positions)
    if in_rows is not False:
        return None
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


def _hint(check: Answer, *args: Any, **more: Any) -> Any:
    return None if _now() else check(*args, **more)
