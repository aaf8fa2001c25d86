"""Packing: several samples in one row, separated by a block-diagonal mask, so that no row needs padding.

A row has samples one after another, with ``position_ids`` that restart at 0 in each. Without an attention mask, current
transformers models find the borders from the positions and mask everything outside of a token's own sample.
:data:`PACKABLE` lists the architectures for which this was verified. Padding at the end of a row has position 0, so
that each padded token is its own sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from torch import nn

from rapidformer_templates.data.collate import IGNORED, Ragged, TokenizedSamples
from rapidformer_templates.errors import ModelError

PACKABLE = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "gemma", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode",
    "gpt_neox", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Architectures for which packing was verified to give the loss, gradients and logits of separate samples."""

PACKABLE_ATTENTION = ("sdpa", "eager")
"""Attention that takes the mask. The flash attention of transformers finds borders only in a single row."""


def assign_rows(lengths: np.ndarray, capacity: int, generator: np.random.Generator) -> np.ndarray:
    """Assign samples to rows by best fit decreasing: the longest first, each into the fullest row with room.

    Samples of equal length are taken in random order. The time is O(n log n), because a row is found by bisection in
    the distinct free spaces, at most ``capacity`` of them.

    Args:
        lengths: tokens of each sample, from 0 to ``capacity``.
        capacity: tokens per row.

    Returns:
        Row numbers from 0 without gaps, shape (samples,).
    """
    assert lengths.max(initial=0) <= capacity
    order = generator.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    open_rows: dict[int, list[int]] = {}  # by remaining space
    spaces: list[int] = []  # its keys in order
    rows, count = np.empty(len(lengths), dtype=np.int64), 0
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        index = bisect_left(spaces, length)
        if index == len(spaces):
            space, row, count = capacity, count, count + 1
        else:
            space = spaces[index]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[index]
        rows[sample] = row
        room = space - length
        if room not in open_rows:
            open_rows[room] = []
            insort(spaces, room)
        open_rows[room].append(row)
    return rows


class PackedRow(dict[str, Any]):
    """A row of several samples.

    Attributes:
        samples: their number.
    """

    samples: int


class PackedRows(TokenizedSamples):
    """Rows of several samples each, with ``input_ids``, ``labels`` and ``position_ids``.

    The assignment of samples to rows is drawn once, so that every epoch has the same number of steps. The order of the
    rows is new in each epoch. The label of each sample's first token is -100, as without packing. So the targets
    and their mean are the same as for the separate samples.

    Args:
        samples: samples with ``input_ids``, and with ``labels`` unless every token is learned.
        capacity: tokens per row. No sample may be longer.
        generator: draws the order of samples of equal length.

    Attributes:
        counts: number of samples in each row.
    """

    def __init__(self, samples: TokenizedSamples, capacity: int, generator: np.random.Generator) -> None:
        ids = samples.rows_of("input_ids")
        rows = assign_rows(ids.lengths, capacity, generator)
        order = np.argsort(rows, kind="stable")
        lengths = ids.lengths[order]
        starts = np.cumsum(lengths) - lengths
        values = ids.gather(order)
        labels = samples.rows_of("labels").gather(order) if "labels" in samples.fields else values.copy()
        labels[starts[lengths > 0]] = IGNORED
        positions = np.arange(len(values)) - np.repeat(starts, lengths)
        counts = np.bincount(rows)
        self.counts: list[int] = counts.tolist()
        of_row = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        fields = {"input_ids": values, "labels": labels, "position_ids": positions}
        super().__init__({name: Ragged.from_flat(flat, of_row) for name, flat in fields.items()})

    def __getitem__(self, index: int) -> PackedRow:
        row = PackedRow(super().__getitem__(index))
        row.samples = self.counts[index]
        return row


def check_packable(model_type: str, flag: str, attention: str | None = None) -> None:
    """Raise a :class:`ModelError` if samples of the same row would see each other in a model.

    Args:
        model_type: as in the model's ``config.json``.
        flag: the flag that needs packing.
        attention: transformers' name of the attention implementation, once the model is built.
    """
    if model_type not in PACKABLE:
        message = f"{model_type} does not separate samples that share a row (or was never verified to)"
        raise ModelError(message, where=flag, hint=f"leave it out, or choose one of {', '.join(PACKABLE)}")
    if attention is not None and attention not in PACKABLE_ATTENTION:
        message = f"the attention implementation {attention} does not separate samples that share a row"
        hint = f"leave it out, or build the model with one of {', '.join(PACKABLE_ATTENTION)}"
        raise ModelError(message, where=flag, hint=hint)


def check_packable_model(model: nn.Module, flag: str) -> None:
    """Apply :func:`check_packable` to a built model."""
    settings = getattr(model, "config", None)
    kind = getattr(settings, "model_type", type(model).__name__)
    check_packable(kind, flag, getattr(settings, "_attn_implementation", ""))
