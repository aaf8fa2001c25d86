"""Rotary embeddings whose frequencies depend on the longest row of a forward: LongRoPE and dynamic NTK scaling.

transformers chooses them for each forward again (``dynamic_rope_update``), and dynamic scaling also remembers the
longest row so far. The loss of a row would depend on the other rows of its micro batch. So they are chosen once, by the
length of the run's rows, as vLLM chooses them by its ``max_model_len``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rapidformer_templates.errors import ModelError


class _ForLength:
    """The forward of a rotary embedding as if each batch had a row of ``length`` tokens.

    Rows of more than ``limit`` tokens have other frequencies.
    """

    def __init__(self, forward: Callable[..., object], length: int, limit: int) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.length, self.limit = length, limit

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object) -> object:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.length - 1)
        output = self.forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor[..., :-1, :], output)


def choose_frequencies(model: nn.Module, length: int | None) -> None:
    """Let the rotary embeddings of a model use the same frequencies for all rows. A second call changes nothing.

    Args:
        length: the longest row of the run, in tokens. None if it is unknown.

    Raises:
        ModelError: it is unknown, and the model accepts rows that have other frequencies.
    """
    parts: Iterator[Any] = model.modules()
    for part in parts:
        limit = _limit_of(part)
        if limit is None or isinstance(part.forward, _ForLength):
            continue
        positions = part.config.max_position_embeddings
        if length is None and positions > limit:
            raise ModelError(
                f"the rotary frequencies of {type(model).__name__} differ for rows of more than {limit:,} tokens, "
                "and the length of the rows is not given",
                where="--seq-length",
                hint=f"give the number of tokens of the longest row: {limit:,} or less, or more",
            )
        part.forward = _ForLength(part.forward, length or positions, limit)


def has_chosen_frequencies(model: nn.Module) -> bool:
    """Return whether a module of the model was changed by :func:`choose_frequencies`."""
    return any(isinstance(part.forward, _ForLength) for part in model.modules())


def notes_about_frequencies(model: nn.Module) -> list[str]:
    """Return a note if all rows have the frequencies of long rows, although the model has others for short ones."""
    forwards = {part.forward for part in model.modules() if isinstance(part.forward, _ForLength)}
    return [
        f"with --seq-length {length}, all rows have the rotary frequencies of rows above {limit} tokens. transformers "
        "alone would use those of short rows for a batch without a longer row"
        for length, limit in {(forward.length, forward.limit) for forward in forwards}
        if length > limit
    ]


def _limit_of(part: Any) -> int | None:
    """Return the number of tokens above which a module has other frequencies. None if it always has the same."""
    kinds, limits = getattr(part, "rope_type", None), []
    by_layer: Mapping[str | None, object] = kinds if isinstance(kinds, Mapping) else {None: kinds}
    for layer, kind in by_layer.items():
        if kind == "longrope":
            parameters = part.config.rope_parameters
            limits.append((parameters[layer] if layer else parameters)["original_max_position_embeddings"])
        elif "dynamic" in str(kind):
            limits.append(part.config.max_position_embeddings)
    return min(limits, default=None)
