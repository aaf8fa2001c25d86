"""Samples of a fixed length across the borders of documents, as GPT is pretrained on.

An epoch is the row of all documents in a new order, cut into samples that follow one another, which are
then put into a new order themselves. Four tables say so: ``ends`` (where each document of the row ends),
``shifts`` (how far from there it lies in the file), ``samples`` (the document in which each sample begins)
and ``shuffle`` (which sample comes when).

The first epoch is Megatron-LM's of the same seed and length, sample by sample. Its later ones are not:
Megatron shuffles all epochs of a run together, so that the order depends on how long the run is, and
some text comes up twice before other text has come up once. Here each epoch has its own tables, a
function of the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rapidformer_templates.data.indexed.cache import IndexCache, Tables, contents, identity
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.types import Rows
from rapidformer_templates.system.files import key_of

TABLES_VERSION = 2
"""Part of the tables' names: raise it when their meaning changes."""

KEPT_EPOCHS = 2


class GPTSamples(Sequence[dict[str, np.ndarray]]):
    """Samples of some documents of an indexed data set, in the order in which they are trained on.

    Item ``p`` is there for every ``p`` from 0 on: ``p // len`` is its epoch. An item has ``input_ids``, of
    the type of the data set and of shape (length + overlap,), and with ``marks_documents`` also
    ``documents`` of that shape: a number that changes where a document begins.

    Args:
        dataset: where the tokens are.
        part: first and last sequence, [first, last).
        length: tokens from the beginning of one sample to that of the next.
        seed: of the orders.
        overlap: tokens that a sample shares with the next one; with 1 every token is a target once.
        marks_documents: give ``documents`` as well.
        cache: keeps the tables.
    """

    in_order = True
    lengths = None
    """All of one length; there is nothing to group by."""

    def __init__(
        self,
        dataset: IndexedDataset,
        part: tuple[int, int],
        length: int,
        seed: int,
        *,
        overlap: int = 1,
        marks_documents: bool = False,
        cache: IndexCache | None = None,
    ) -> None:
        self.dataset = dataset
        self.part = part
        self.length, self.overlap = length, overlap
        self.seed = seed
        self.marks_documents = marks_documents
        self.cache = cache or IndexCache()
        self.tokens = _tokens_of(dataset, part)
        self.samples = max(0, (self.tokens - overlap) // length)
        self._epochs: dict[int, Tables] = {}

    @property
    def identity(self) -> str:
        """What the samples depend on beside the seed; a resumed run must have the same."""
        apart = ", documents kept apart" if self.marks_documents else ""
        return f"{self.tokens} tokens{contents(self.dataset)} in samples of {self.length}{apart}"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, position: Any) -> Any:
        if position < 0:
            position = range(self.samples)[position]
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several items at once, which is several times faster than one by one."""
        epochs, within = np.divmod(np.asarray(positions, np.int64), self.samples)
        if epochs[0] == epochs[-1] and (epochs == epochs[0]).all():
            return self._read(int(epochs[0]), within)
        return [self._read(int(e), within[i : i + 1])[0] for i, e in enumerate(epochs)]

    def _read(self, epoch: int, within: np.ndarray) -> list[dict[str, np.ndarray]]:
        tables = self._tables(epoch)
        ends, size = tables["ends"], self.length + self.overlap
        samples = tables["shuffle"][within].astype(np.int64)
        begins = samples * self.length
        # 1. The documents that each sample goes through, one row for each piece of one.
        first, last = tables["samples"][samples], tables["samples"][samples + 1]
        counts = last.astype(np.int64) - first + 1
        sample = np.repeat(np.arange(len(within)), counts)
        document = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        # 2. Where each piece begins and ends, in the row of all documents, and where that is in the file.
        begin = np.maximum(ends[document], begins[sample])
        end = np.minimum(ends[document + 1], begins[sample] + size)
        start = begin + tables["shifts"][document]
        stop = start + np.maximum(end - begin, 0)
        # 3. One copy.
        columns = {"input_ids": self.dataset.gather(start, stop).reshape(len(within), size)}
        if self.marks_documents:
            columns["documents"] = np.repeat(document, stop - start).reshape(len(within), size)
        return Rows(columns)

    def _tables(self, epoch: int) -> Tables:
        if epoch not in self._epochs:
            # A batch touches one epoch, or two at a border.
            for old in sorted(self._epochs)[: 1 - KEPT_EPOCHS]:
                del self._epochs[old]
            name = "gpt-" + key_of(
                [TABLES_VERSION, identity(self.dataset.prefix), self.part, self.length, self.overlap, self.seed, epoch]
            )
            self._epochs[epoch] = self.cache(name, lambda: self._make_tables(epoch))
        return self._epochs[epoch]

    def _make_tables(self, epoch: int) -> Tables:
        """The tables of an epoch; time and memory linear in the documents and the samples, all in numpy."""
        state = np.random.RandomState(self.seed if epoch == 0 else [self.seed, epoch])
        documents = np.arange(*self.part, dtype=np.int32 if self.part[1] < 2**31 else np.int64)
        state.shuffle(documents)
        ends = np.zeros(len(documents) + 1, np.int64)
        np.cumsum(self.dataset.lengths[documents], out=ends[1:])
        begins = np.arange(self.samples + 1, dtype=np.int64) * self.length
        samples = np.searchsorted(ends, begins, side="right") - 1
        # Without an overlap the last sample may end where the last document does.
        samples = np.minimum(samples, len(documents) - 1).astype(documents.dtype)
        shuffle = np.arange(self.samples, dtype=np.uint32 if self.samples < 2**32 - 2 else np.int64)
        state.shuffle(shuffle)
        shifts = self.dataset.pointers[documents] // self.dataset.dtype.itemsize - ends[:-1]
        return {"ends": ends, "shifts": shifts, "samples": samples, "shuffle": shuffle}

    def __getstate__(self) -> dict[str, Any]:
        # Memory-mapped tables would travel to a loader process as copies.
        return self.__dict__ | {"_epochs": {}}


def _tokens_of(dataset: IndexedDataset, part: tuple[int, int]) -> int:
    """Tokens of the sequences [first, last): they lie one after another."""
    first, last = part
    if first >= last:
        return 0
    end = int(dataset.pointers[last - 1]) // dataset.dtype.itemsize + int(dataset.lengths[last - 1])
    return end - int(dataset.pointers[first]) // dataset.dtype.itemsize
