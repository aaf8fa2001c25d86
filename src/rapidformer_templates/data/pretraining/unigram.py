"""The loss of a unigram model. A language model with a lower loss has learned more than word counts."""

from __future__ import annotations

import numpy as np

from rapidformer_templates.data.indexed.dataset import CHUNK, IndexedDataset
from rapidformer_templates.errors import DataError


def counts_of(dataset: IndexedDataset, part: tuple[int, int]) -> np.ndarray:
    """Count the tokens in the sequences [first, last), shape (largest token + 1,). Reads the tokens once.

    Raises:
        DataError: a token is negative.
    """
    first, last = part
    counts = np.zeros(0, np.int64)
    if first >= last:
        return counts
    size = dataset.dtype.itemsize
    begin, end = int(dataset.pointers[first]) // size, int(dataset.pointers[last - 1]) // size
    end += int(dataset.lengths[last - 1])
    for start in range(begin, end, CHUNK):
        tokens = dataset.tokens[start : min(start + CHUNK, end)]
        if int(tokens.min()) < 0:
            raise DataError(f"there are negative tokens, such as {int(tokens.min())}", where=dataset.prefix)
        occurrences = np.bincount(tokens)
        longer, shorter = (occurrences, counts) if len(occurrences) > len(counts) else (counts, occurrences)
        counts = longer.astype(np.int64)
        counts[: len(shorter)] += shorter
    return counts


def unigram_loss(dataset: IndexedDataset, train: tuple[int, int], held_out: tuple[int, int]) -> float:
    """Return the mean negative log-likelihood of the held-out tokens under the training counts, in nats per token.

    One is added to each count (Laplace), so that tokens missing in the training part have a probability.
    """
    train_counts, held_out_counts = counts_of(dataset, train), counts_of(dataset, held_out)
    size = max(len(train_counts), len(held_out_counts))
    train_counts, held_out_counts = (
        np.pad(counts, (0, size - len(counts))) for counts in (train_counts, held_out_counts)
    )
    likelihood = np.log(train_counts + 1) - np.log(train_counts.sum() + size)
    return float(-(held_out_counts * likelihood).sum() / held_out_counts.sum())
