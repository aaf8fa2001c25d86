"""Samples of an indexed data set: windows across the borders of documents, as in GPT pretraining, and documents.

An epoch of windows concatenates all documents in a new order and splits them into consecutive samples. The samples are
then shuffled, too. Four tables describe this: ``ends`` (where each document of the concatenation ends), ``shifts`` (its
offset in the file relative to the concatenation), ``samples`` (the document in which each sample begins) and
``shuffle`` (the order of the samples).

With the same seed and length, the first epoch equals Megatron-LM's, sample by sample. Later epochs differ. Megatron
shuffles all epochs of a run together. So its order depends on the length of the run, and some text is used twice before
other text is used once. Here each epoch has its own tables, which depend only on the seed and the epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy

import numpy as np

from rapidformer_templates.data.indexed.cache import IndexCache, Tables, contents, identity
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.order import NewestEpochs, Stream
from rapidformer_templates.data.types import Rows
from rapidformer_templates.system.files import hash_of

TABLES_VERSION = 2
"""Part of the tables' names. Increase it when their meaning changes."""


class GPTSamples:
    """Samples of some documents of an indexed data set, in training order.

    There is an item ``p`` for every ``p`` from 0 on. Its epoch is ``p // len``. An item has ``input_ids`` with the
    dtype of the data set and shape (length + overlap,). With ``marks_documents`` it also has ``documents`` of that
    shape: a number that changes where a document begins.

    Args:
        dataset: the data set with the tokens.
        part: first and last sequence, [first, last).
        length: tokens from the beginning of one sample to the beginning of the next.
        seed: seed of the orders.
        overlap: tokens that a sample shares with the next one. With 1 every token is a target once.
        marks_documents: also return ``documents``.
        cache: stores the tables.
    """

    in_order = True
    lengths = None
    """All samples have the same length, so there is nothing to group by."""

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
        first, last = part
        self.tokens = 0
        if first < last:  # sequences are stored one after another
            end = int(dataset.pointers[last - 1]) // dataset.dtype.itemsize + int(dataset.lengths[last - 1])
            self.tokens = end - int(dataset.pointers[first]) // dataset.dtype.itemsize
        self.samples = max(0, (self.tokens - overlap) // length)
        self._epochs = NewestEpochs(self._tables)

    @property
    def identity(self) -> str:
        """Everything except the seed that the samples depend on. A resumed run must have the same."""
        suffix = ", documents kept apart" if self.marks_documents else ""
        return f"{self.tokens} tokens{contents(self.dataset)} in samples of {self.length}{suffix}"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        if position < 0:
            position = range(self.samples)[position]
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return several items at once, which is several times faster than one at a time."""
        epochs, within = np.divmod(np.asarray(positions, np.int64), self.samples)
        if epochs[0] == epochs[-1] and (epochs == epochs[0]).all():
            return self._read(int(epochs[0]), within)
        return [self._read(int(e), within[i : i + 1])[0] for i, e in enumerate(epochs)]

    def _read(self, epoch: int, within: np.ndarray) -> list[dict[str, np.ndarray]]:
        tables = self._epochs[epoch]
        ends, size = tables["ends"], self.length + self.overlap
        samples = tables["shuffle"][within].astype(np.int64)
        begins = samples * self.length
        # 1. Find the documents of each sample. Each piece of a document is one row.
        first, last = tables["samples"][samples], tables["samples"][samples + 1]
        counts = last.astype(np.int64) - first + 1
        sample = np.repeat(np.arange(len(within)), counts)
        document = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        # 2. Find where each piece begins and ends, in the concatenation of all documents and in the file.
        begin = np.maximum(ends[document], begins[sample])
        end = np.minimum(ends[document + 1], begins[sample] + size)
        start = begin + tables["shifts"][document]
        stop = start + np.maximum(end - begin, 0)
        # 3. Copy once.
        columns = {"input_ids": self.dataset.gather(start, stop).reshape(len(within), size)}
        if self.marks_documents:
            columns["documents"] = np.repeat(document, stop - start).reshape(len(within), size)
        return Rows(columns)

    def _tables(self, epoch: int) -> Tables:
        shape = (self.part, self.length, self.overlap, self.seed, epoch)
        name = "gpt-" + hash_of([TABLES_VERSION, identity(self.dataset.prefix), *shape])
        return self.cache(name, lambda: self._make_tables(epoch))

    def _make_tables(self, epoch: int) -> Tables:
        """Build the tables of an epoch in numpy. Time and memory are linear in the documents and the samples."""
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


class Documents:
    """Each sequence of a part of an indexed data set as a sample. Long sequences are split.

    A fraction of the samples can be split in two at a random position, so that a model also learns from short ones (the
    short sequences of BERT's pretraining data, Devlin et al. 2019, appendix A.2). Both halves are samples. So nothing
    is lost, and all lengths are known before the first batch.

    ``a + b`` has the samples of both. Building takes O(sequences) in numpy, and 16 bytes per sample.

    Args:
        dataset: the data set with the tokens.
        part: first and last sequence, [first, last).
        length: maximum number of tokens from the beginning of one sample to the beginning of the next.
        overlap: tokens that a sample shares with the next one of its document. With 1, every token except a document's
            first is a target once, and a document of one token is not a sample.
        short_probability: fraction of the samples that are split in two. Samples of one token are not split.
        seed: seed of these splits.

    Attributes:
        sizes: number of tokens of each sample.
        tokens: total number of tokens.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        part: tuple[int, int],
        length: int,
        *,
        overlap: int = 0,
        short_probability: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.part = part
        firsts = dataset.pointers[slice(*part)] // dataset.dtype.itemsize
        sizes = dataset.lengths[slice(*part)].astype(np.int64)
        # 1. Split long documents. All pieces except a document's last have ``length + overlap`` tokens.
        pieces = np.maximum(-(-(sizes - overlap) // length), 0)
        number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offsets = number * length
        firsts = np.repeat(firsts, pieces) + offsets
        sizes = np.minimum(np.repeat(sizes, pieces) - offsets, length + overlap)
        # 2. Split a fraction of the pieces in two, at a position with a uniform distribution.
        draw = np.random.default_rng((seed, Stream.DOCUMENTS))
        is_split = (draw.random(len(sizes)) < short_probability) & (sizes > 1)
        heads = np.where(is_split, draw.integers(1, np.maximum(sizes, 2)), sizes)
        halves = np.stack([heads, sizes - heads], axis=1)
        starts = np.stack([firsts, firsts + heads], axis=1)
        self._firsts, self.sizes = starts[halves > 0], halves[halves > 0]
        self._sets, self._borders = [dataset], [0]

    @property
    def tokens(self) -> int:
        return int(self.sizes.sum())

    def __add__(self, other: Documents) -> Documents:
        both = copy(self)
        both._firsts = np.concatenate([self._firsts, other._firsts])
        both.sizes = np.concatenate([self.sizes, other.sizes])
        both._sets = self._sets + other._sets
        both._borders = self._borders + [border + len(self) for border in other._borders]
        return both

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = range(len(self))[index]
        first = int(self._firsts[index])
        dataset = self._sets[bisect_right(self._borders, index) - 1]
        return {"input_ids": dataset.tokens[first : first + int(self.sizes[index])]}
