"""Documents as samples with their own lengths, for dynamic shapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.random_streams import Stream


class Documents(Sequence[dict[str, np.ndarray]]):
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
        firsts, sizes = _split_long(firsts, dataset.lengths[slice(*part)].astype(np.int64), length, overlap)
        self._firsts, self.sizes = _split_some(firsts, sizes, short_probability, seed)
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

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        first = int(self._firsts[index])
        dataset = self._sets[bisect_right(self._borders, index) - 1]
        return {"input_ids": dataset.tokens[first : first + int(self.sizes[index])]}


def _split_long(firsts: np.ndarray, sizes: np.ndarray, length: int, overlap: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (first tokens, sizes) of the pieces of documents.

    All pieces except a document's last have ``length + overlap`` tokens.
    """
    pieces = np.maximum(-(-(sizes - overlap) // length), 0)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * length
    return np.repeat(firsts, pieces) + offsets, np.minimum(np.repeat(sizes, pieces) - offsets, length + overlap)


def _split_some(firsts: np.ndarray, sizes: np.ndarray, probability: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a fraction of the pieces in two, at a position with a uniform distribution."""
    draw = np.random.default_rng((seed, Stream.DOCUMENTS))
    split = (draw.random(len(sizes)) < probability) & (sizes > 1)
    heads = np.where(split, draw.integers(1, np.maximum(sizes, 2)), sizes)
    halves = np.stack([heads, sizes - heads], axis=1)
    starts = np.stack([firsts, firsts + heads], axis=1)
    nonempty = halves > 0
    return starts[nonempty], halves[nonempty]
