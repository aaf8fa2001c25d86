"""Documents as samples of their own length: what dynamic shapes are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class TokenStream(Protocol):
    """Tokenized documents, one after another.

    Attributes:
        tokens: the stream; anything that slices.
        ends: where each document ends in it, with 0 before the first; shape (documents + 1,).
    """

    @property
    def tokens(self) -> Any: ...

    @property
    def ends(self) -> np.ndarray: ...


class Documents(Sequence[dict[str, np.ndarray]]):
    """The documents of a part of a stream, each a sample; long ones are cut into several.

    A share of the samples can be cut in two at a random place, so that a model also learns from short
    ones (the short sequences of BERT's pretraining data, Devlin et al. 2019, appendix A.2). Both halves
    are samples: nothing is lost, and all lengths are known before the first batch is formed.

    Building costs O(documents) in numpy, and 24 bytes a sample.

    Args:
        stream: where the tokens are.
        part: first and last document, [first, last).
        length: most tokens of the stream in a sample.
        before, after: tokens that are put around each sample, such as ``[CLS]`` and ``[SEP]``.
        dropped: tokens at the end of each document that are left out (its end token, for instance).
        short_probability: share of the samples that are cut in two; those of one token are left alone.
        seed: of these cuts.

    Attributes:
        lengths: number of tokens of each sample, with those around it.
    """

    def __init__(
        self,
        stream: TokenStream,
        part: tuple[int, int],
        length: int,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        *,
        dropped: int = 0,
        short_probability: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.stream = stream
        self.before, self.after = np.asarray(before, np.int64), np.asarray(after, np.int64)
        ends = np.asarray(stream.ends[part[0] : part[1] + 1], np.int64)
        firsts, sizes = _cut(ends[:-1], np.maximum(np.diff(ends) - dropped, 0), length)
        self._firsts, self._sizes = _cut_some(firsts, sizes, short_probability, seed)
        self.lengths = self._sizes + (len(before) + len(after))

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        first = int(self._firsts[index])
        tokens = self.stream.tokens[first : first + int(self._sizes[index])]
        if len(self.before) or len(self.after):
            return {"input_ids": np.concatenate([self.before, tokens, self.after])}
        return {"input_ids": tokens}


def _cut(firsts: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(first tokens, sizes) of the pieces of documents: as many of ``length`` as there are, and the rest."""
    pieces = -(-sizes // length)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * length
    return np.repeat(firsts, pieces) + offsets, np.minimum(np.repeat(sizes, pieces) - offsets, length)


def _cut_some(firsts: np.ndarray, sizes: np.ndarray, probability: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a share of the pieces in two, after a number of tokens that is evenly drawn."""
    draw = np.random.default_rng((seed, 4))
    cut = (draw.random(len(sizes)) < probability) & (sizes > 1)
    heads = np.where(cut, draw.integers(1, np.maximum(sizes, 2)), sizes)
    halves = np.stack([heads, sizes - heads], axis=1)
    starts = np.stack([firsts, firsts + heads], axis=1)
    kept = halves > 0
    return starts[kept], halves[kept]
