"""Tokenized samples in flat memory, and how they are collated or packed.

Both are needed in every step. So a sample is a slice of one long array (no object per token), and a batch is one
scatter into a padded array.

Packing puts several samples in one row, separated by a block-diagonal mask, so that no row needs padding. A row has
samples one after another, with ``position_ids`` that restart at 0 in each. Without an attention mask, current
transformers models find the borders from the positions and mask everything outside of a token's own sample.
:data:`PACKABLE` lists the architectures for which this was verified. Padding at the end of a row has position 0, so
that each padded token is its own sample.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rapidformer_templates.data.shapes import Shape
from rapidformer_templates.data.types import Batch, Rows, Sample
from rapidformer_templates.errors import DataError, ModelError

IGNORED = -100
"""The label that torch's cross-entropy ignores."""


def count_targets(batch: Batch, *, shifted: bool) -> float:
    """Count the labels that are not -100, or the samples if there are no labels.

    Args:
        batch: a mapping with ``labels`` of shape (samples,) or (samples, tokens), or anything else. If it has labels
            that are already shifted (``shift_labels``), those are counted.
        shifted: the model compares token ``t`` with label ``t + 1``, so each sample's first label is unused.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if labels is None:
        return samples_in(batch)
    if "shift_labels" in batch:
        labels, shifted = batch["shift_labels"], False
    if labels.is_floating_point():
        return len(labels)  # a regression: its loss is a mean over the samples
    if shifted and labels.ndim > 1:
        labels = labels[:, 1:]
    if labels.is_cpu:
        return int(np.count_nonzero(labels.numpy() != IGNORED))  # several times faster than torch for so few numbers
    return int((labels != IGNORED).sum())


def samples_in(batch: Batch) -> int:
    """Return the first dimension of a batch's tensors, or 0 if there is none.

    Args:
        batch: tensors in dicts, lists and tuples, or in another mapping (transformers' ``BatchEncoding``).
    """
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0), 0)


def shifted_left(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels of shape (samples, tokens) left by one token. The last position is ignored."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


class Ragged:
    """Rows of unequal length in one flat array.

    Args:
        rows: the rows, or one array with all values.
        lengths: the lengths of the rows in such an array.
    """

    def __init__(
        self, rows: Iterable[Sequence[int] | np.ndarray] | np.ndarray, lengths: np.ndarray | None = None
    ) -> None:
        if lengths is None:
            rows = list(rows)
            lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
            rows = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))
        self.values, self.lengths = np.asarray(rows, dtype=np.int32), lengths
        # Python integers: slicing with them is twice as fast as with numpy integers.
        self.ends: list[int] = [0, *np.cumsum(lengths).tolist()]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.ends[row] : self.ends[row + 1]]

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Return the concatenated values of some rows with one indexing of the flat array."""
        lengths = self.lengths[rows]
        shifts = np.asarray(self.ends)[rows] - (np.cumsum(lengths) - lengths)
        gathered: np.ndarray = self.values[np.arange(lengths.sum()) + np.repeat(shifts, lengths)]
        return gathered


class TokenizedSamples:
    """Samples as dicts of rows (``input_ids``, …) and single values (``labels`` of a classifier, …).

    Args:
        fields: a :class:`Ragged` or a list with one value per sample for each name. All have the same length.
    """

    def __init__(self, fields: Mapping[str, Ragged | Sequence[object]]) -> None:
        self.fields = dict(fields)
        self._count = len(next(iter(self.fields.values())))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(self._count))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            index = range(self._count)[index]  # handles negative indices, and raises IndexError beyond the end
        return {name: values[index] for name, values in self.fields.items()}

    @property
    def lengths(self) -> np.ndarray:
        """Number of input tokens of each sample."""
        return self.rows_of("input_ids").lengths

    def rows_of(self, name: str) -> Ragged:
        """Return the rows of one field."""
        field = self.fields[name]
        assert isinstance(field, Ragged)
        return field


@dataclass
class PadCollate:
    """Collates samples, padded on the right to the longest row, to a fixed length or to a shape.

    If a shape has more rows than samples, the additional rows repeat the first sample with -100 as its labels.

    Attributes:
        padding: the padding value of each field that is a row. Other fields become a tensor with one value per sample.
        mask: add ``attention_mask``, 1 on tokens and 0 on padding, shape (samples, tokens).
        length: the length of all rows. None uses the longest row of the batch.
    """

    padding: Mapping[str, int]
    _: KW_ONLY
    mask: bool = True
    length: int | None = None

    def __call__(self, samples: list[Sample], shape: Shape | None = None) -> dict[str, torch.Tensor]:
        if shape is not None:
            sample = samples[0]
            targets = [name for name in sample if "label" in name]
            if not targets or any(np.asarray(sample[name]).dtype.kind not in "iu" for name in targets):
                raise DataError(
                    "a batch that is not full needs rows that do not count, and only whole-number labels can mark them",
                    where="collate",
                    hint="give the samples such labels, or write your own collate function that takes a shape",
                )
            # The index turns an array without dimensions into a number.
            ignored = {name: np.full_like(sample[name], IGNORED, dtype=np.int64)[()] for name in targets}
            samples = samples + [{**sample, **ignored}] * (shape.rows - len(samples))
        batch: dict[str, torch.Tensor] = {}
        for name in samples[0]:
            column = [sample[name] for sample in samples]
            if name not in self.padding:
                batch[name] = torch.tensor(column)
                continue
            padded, filled = pad_rows(column, self.padding[name], shape.length if shape else self.length)
            batch[name] = torch.from_numpy(padded)
            if self.mask and name == "input_ids":
                batch["attention_mask"] = torch.from_numpy(filled.astype(np.int64))
        return batch


def pad_rows(rows: Sequence[np.ndarray], padding: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return an int64 array of shape (rows, length), and a bool array that is True at values and False at padding.

    Args:
        length: length of the padded rows. None uses the longest row.

    Raises:
        DataError: a row is longer than ``length``.
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    longest = max(1, int(lengths.max()))  # models cannot take zero tokens, but an empty text has none
    if length is not None and longest > length:
        message = f"a row of {longest:,} tokens does not fit into a batch of length {length:,}"
        hint = "the lengths of the samples must be those that augment() leaves: see Data.lengths"
        raise DataError(message, where="collate", hint=hint)
    filled = np.arange(length or longest) < lengths[:, None]
    padded = np.full(filled.shape, padding, dtype=np.int64)
    padded[filled] = np.concatenate(rows)
    return padded, filled


@dataclass(frozen=True)
class CausalCollate:
    """Collates samples for causal language models, whose labels are their inputs.

    Transformers shifts labels inside the loss, so the first label is never used. It is -100 here, like the labels on
    padding. The remaining labels are exactly the predicted tokens.
    """

    pad_token_id: int
    mask: bool = True

    def __call__(self, samples: list[Sample], shape: Shape | None = None) -> dict[str, torch.Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        if shape is not None:
            rows += [rows[0]] * (shape.rows - len(samples))
        padded, filled = pad_rows(rows, self.pad_token_id, shape.length if shape else None)
        labels = np.where(filled, padded, IGNORED)
        labels[:, 0] = IGNORED
        labels[len(samples) :] = IGNORED
        batch = {"input_ids": torch.from_numpy(padded), "labels": torch.from_numpy(labels)}
        if self.mask:
            batch["attention_mask"] = torch.from_numpy(filled.astype(np.int64))
        return batch


@dataclass(frozen=True)
class WindowCollate:
    """Collates windows of equal length for causal language models. Each token is the target of the one before it.

    A window has one token more than the model sees, because its last token is only a target. So the targets are shifted
    here (``shift_labels`` of transformers, shape (samples, tokens)). ``labels`` only enable the loss. All windows have
    the same length, so there is no padding and no mask.

    Attributes:
        keeps_documents_apart: no token sees another document. Positions restart in each document, which makes
            transformers mask the attention. The first token of a document is not a target.
    """

    keeps_documents_apart: bool = False

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        tokens = _stacked(samples, "input_ids")
        inputs = torch.from_numpy(tokens[:, :-1].astype(np.int64))
        targets = tokens[:, 1:].astype(np.int64)
        batch = {"input_ids": inputs, "labels": inputs}
        if self.keeps_documents_apart:
            documents = _stacked(samples, "documents")
            begins = np.diff(documents, axis=1) != 0
            targets[begins] = IGNORED
            # The position of each token in its document: its distance to the last beginning.
            positions = np.arange(inputs.shape[1])
            starts = np.where(np.pad(begins[:, :-1], ((0, 0), (1, 0))), positions, 0)
            batch["position_ids"] = torch.from_numpy(positions - np.maximum.accumulate(starts, axis=1))
        return batch | {"shift_labels": torch.from_numpy(targets)}


@dataclass(frozen=True)
class DocumentCollate:
    """Collates like :class:`WindowCollate`, for documents of any length, padded on the right.

    There is no mask, because no token of a causal model sees tokens to its right.
    """

    pad_token_id: int

    def __call__(self, samples: list[Sample], shape: Shape | None = None) -> dict[str, torch.Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        if shape is not None:
            rows += [rows[0]] * (shape.rows - len(samples))
        length = shape.length if shape else None
        inputs = torch.from_numpy(pad_rows([row[:-1] for row in rows], self.pad_token_id, length)[0])
        targets, _ = pad_rows([row[1:] for row in rows], IGNORED, length)
        targets[len(samples) :] = IGNORED
        return {"input_ids": inputs, "labels": inputs, "shift_labels": torch.from_numpy(targets)}


def _stacked(samples: Sequence[Sample], name: str) -> np.ndarray:
    """Return rows of equal length as one array, without a copy if they already are rows of one array."""
    if isinstance(samples, Rows):
        return samples.columns[name]
    return np.concatenate([sample[name] for sample in samples]).reshape(len(samples), -1)


Collate = Callable[..., dict[str, torch.Tensor]]
"""Combines a list of samples into a batch, and may take a shape."""


def check_pads_to_shape(collate: Callable[..., Batch] | None) -> None:
    """Check that a collate function takes a shape.

    Raises:
        DataError: it does not.
    """
    if collate is None or "shape" not in inspect.signature(collate).parameters:
        name = "the default one" if collate is None else getattr(collate, "__qualname__", type(collate).__name__)
        raise DataError(
            f"the collate function ({name}) cannot pad a batch to a shape",
            where="--data-iterator dynamic-shape",
            hint="use PadCollate or CausalCollate of rapidformer_templates.data.collate, or one with a second "
            "parameter: collate(samples, shape=None), where shape is (rows, length)",
        )


def collate_to_shape(collate: Callable[..., Batch], samples: list[object], shape: Shape) -> Batch:
    """Collate a batch of exactly this shape.

    Raises:
        DataError: the batch has another shape.
    """
    batch = collate(samples, shape=shape)
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    actual = (samples_in(batch), shape.length) if ids is None else tuple(ids.shape)
    if actual != tuple(shape):
        raise DataError(
            f"collate made a batch of {actual[0]} rows × {actual[-1]} tokens, not of {shape.rows} × {shape.length}",
            where="collate(samples, shape)",
            hint="pad the rows to shape[1] tokens, and add rows that do not count until there are shape[0]",
        )
    return batch


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
        super().__init__({name: Ragged(flat, of_row) for name, flat in fields.items()})

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
