"""Tokenized samples in flat memory, and how they become a batch.

Both are on the path of every step: an item is a slice of one long array (no object per token), and
a batch is one scatter into a padded array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from rapidformer_templates.data.shapes import Shape
from rapidformer_templates.data.targets import IGNORED, samples_in
from rapidformer_templates.data.types import Rows
from rapidformer_templates.errors import DataError


class Ragged:
    """Rows of unequal length in one flat array."""

    def __init__(self, rows: Iterable[Sequence[int] | np.ndarray]) -> None:
        rows = list(rows)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        self._hold(np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum())), lengths)

    @classmethod
    def from_flat(cls, values: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Rows of these lengths that stand one behind the other in ``values``."""
        ragged = cls.__new__(cls)
        ragged._hold(values.astype(np.int32, copy=False), lengths)
        return ragged

    def _hold(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values, self.lengths = values, lengths
        # Python integers: slicing by them is twice as fast as by numpy's.
        self.ends: list[int] = [0, *np.cumsum(lengths).tolist()]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.ends[row] : self.ends[row + 1]]

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The values of some rows, one behind the other, in one indexing of the flat array."""
        lengths = self.lengths[rows]
        shifts = np.asarray(self.ends)[rows] - (np.cumsum(lengths) - lengths)
        gathered: np.ndarray = self.values[np.arange(lengths.sum()) + np.repeat(shifts, lengths)]
        return gathered


class TokenizedSamples(Sequence[dict[str, Any]]):
    """Samples as dicts of rows (``input_ids``, …) and single values (``labels`` of a classifier, …).

    Args:
        fields: for each name a :class:`Ragged`, or a list with one value a sample; all of one length.
    """

    def __init__(self, fields: Mapping[str, Ragged | list[Any]]) -> None:
        self.fields = dict(fields)
        self._count = len(next(iter(self.fields.values())))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            index = range(self._count)[index]  # negative indices count from the end; beyond it is an IndexError
        return {name: values[index] for name, values in self.fields.items()}

    @property
    def lengths(self) -> np.ndarray:
        """Number of input tokens of each sample."""
        return self.lengths_of("input_ids")

    def lengths_of(self, name: str) -> np.ndarray:
        """Length of the rows of one field."""
        return self.rows_of(name).lengths

    def rows_of(self, name: str) -> Ragged:
        """The rows of one field."""
        field = self.fields[name]
        assert isinstance(field, Ragged)
        return field


class PadCollate:
    """Batches padded on the right to their longest row, to one length or to a shape.

    Rows that a shape has beyond the samples repeat the first one with -100 as its labels.

    Args:
        padding: for each field that is a row, the value that fills it up. Other fields become a
            tensor of one value a sample.
        mask: add ``attention_mask``, 1 on tokens and 0 on padding, shape (samples, tokens).
        length: the length of all rows; None is that of the longest in the batch.
    """

    def __init__(self, padding: Mapping[str, int], *, mask: bool = True, length: int | None = None) -> None:
        self.padding = dict(padding)
        self.mask = mask
        self.length = length

    def __call__(self, samples: list[Mapping[str, Any]], shape: Shape | None = None) -> dict[str, torch.Tensor]:
        if shape is not None:
            samples = samples + [self._without_targets(samples[0])] * (shape.rows - len(samples))
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

    def _without_targets(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with nothing to learn from it."""
        targets = [name for name in sample if "label" in name]
        if not targets or any(np.asarray(sample[name]).dtype.kind not in "iu" for name in targets):
            raise DataError(
                "a batch that is not full needs rows that count for nothing, and only whole-number labels can say so",
                where="collate",
                hint="give the samples such labels, or a collate function of your own that takes a shape",
            )
        # The index makes a number of an array without dimensions.
        return {**sample, **{name: np.full_like(sample[name], IGNORED, dtype=np.int64)[()] for name in targets}}


def pad_rows(rows: Sequence[np.ndarray], padding: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(int64 array of shape (rows, length), bool array that is True where it holds a value).

    Args:
        length: of the padded rows; None is the longest of them.

    Raises:
        DataError: a row is longer.
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    longest = max(1, int(lengths.max()))  # models cannot take zero tokens, and an empty text has none
    if length is not None and longest > length:
        raise DataError(
            f"a row of {longest:,} tokens does not fit into a batch of length {length:,}",
            where="collate",
            hint="the lengths of the samples must be those that augment() leaves: see Data.lengths",
        )
    filled = np.arange(length or longest) < lengths[:, None]
    padded = np.full(filled.shape, padding, dtype=np.int64)
    padded[filled] = np.concatenate(rows)
    return padded, filled


class CausalCollate:
    """Batches for causal language models, whose labels are their inputs.

    Transformers shifts labels inside the loss, so that the first one is never used. It is -100 here,
    like those on padding: the labels that are left are exactly the tokens that are predicted.
    """

    def __init__(self, pad_token_id: int, *, mask: bool = True) -> None:
        self.pad_token_id = pad_token_id
        self.mask = mask

    def __call__(self, samples: list[Mapping[str, Any]], shape: Shape | None = None) -> dict[str, torch.Tensor]:
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


class WindowCollate:
    """Batches of windows of one length for causal language models, each token the target of the one before it.

    A window has one token more than the model is given: its last token is a target only. So the targets
    are shifted here (``shift_labels`` of transformers, shape (samples, tokens)); ``labels`` only switch
    the loss on. All windows are of one length, so there is no padding and no mask.

    Args:
        keeps_documents_apart: no token sees another document: positions begin anew with each document,
            by which transformers masks the attention, and its first token is no target.
    """

    def __init__(self, *, keeps_documents_apart: bool = False) -> None:
        self.keeps_documents_apart = keeps_documents_apart

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = _stacked(samples, "input_ids")
        inputs = torch.from_numpy(tokens[:, :-1].astype(np.int64))
        targets = tokens[:, 1:].astype(np.int64)
        batch = {"input_ids": inputs, "labels": inputs}
        if self.keeps_documents_apart:
            documents = _stacked(samples, "documents")
            begins = np.diff(documents, axis=1) != 0
            targets[begins] = IGNORED
            batch["position_ids"] = torch.from_numpy(_positions(begins[:, :-1]))
        return batch | {"shift_labels": torch.from_numpy(targets)}


class DocumentCollate:
    """As :class:`WindowCollate`, of documents of any length, padded on the right.

    There is no mask: no token of a causal model looks at what is to its right.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[Mapping[str, Any]], shape: Shape | None = None) -> dict[str, torch.Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        if shape is not None:
            rows += [rows[0]] * (shape.rows - len(samples))
        length = shape.length if shape else None
        inputs = torch.from_numpy(pad_rows([row[:-1] for row in rows], self.pad_token_id, length)[0])
        targets, _ = pad_rows([row[1:] for row in rows], IGNORED, length)
        targets[len(samples) :] = IGNORED
        return {"input_ids": inputs, "labels": inputs, "shift_labels": torch.from_numpy(targets)}


def _stacked(samples: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """The rows of one length as one array; without a copy where they are the rows of one."""
    if isinstance(samples, Rows):
        return samples.columns[name]
    return np.concatenate([sample[name] for sample in samples]).reshape(len(samples), -1)


def _positions(begins: np.ndarray) -> np.ndarray:
    """Place of each token in its document, int64; ``begins`` says so of all but the first token of a row."""
    positions = np.arange(begins.shape[1] + 1)
    starts = np.where(np.pad(begins, ((0, 0), (1, 0))), positions, 0)
    return positions - np.maximum.accumulate(starts, axis=1)


Collate = Callable[[list[Any]], dict[str, torch.Tensor]]


def check_pads_to_shape(collate: Callable[..., Any] | None) -> None:
    """Look whether a collate function takes a shape.

    Raises:
        DataError: it does not.
    """
    if collate is None or "shape" not in inspect.signature(collate).parameters:
        name = "the default one" if collate is None else getattr(collate, "__qualname__", type(collate).__name__)
        raise DataError(
            f"the collate function ({name}) cannot pad a batch to a shape",
            where="--data-iterator dynamic-shape",
            hint="take PadCollate or CausalCollate of rapidformer_templates.data.collate, or one with a second "
            "parameter: collate(samples, shape=None), where shape is (rows, length)",
        )


def collate_to_shape(collate: Callable[..., Any], samples: list[Any], shape: Shape) -> Any:
    """A batch of exactly that shape.

    Raises:
        DataError: it has another one.
    """
    batch = collate(samples, shape=shape)
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    made = (samples_in(batch), shape.length) if ids is None else tuple(ids.shape)
    if made != tuple(shape):
        raise DataError(
            f"collate made a batch of {made[0]} rows × {made[-1]} tokens, not of {shape.rows} × {shape.length}",
            where="collate(samples, shape)",
            hint="pad the rows to shape[1] tokens, and add rows that count for nothing until there are shape[0]",
        )
    return batch
