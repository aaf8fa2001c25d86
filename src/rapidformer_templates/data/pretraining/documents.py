"""Documents as samples with their own lengths, for dynamic shapes."""

from __future__ import annotations

from bisect import bisect_right
from copy import copy

import numpy as np

from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.random_streams import Stream


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
