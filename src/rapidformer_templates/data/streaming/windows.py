"""Fixed-length windows of a stream of documents. They cross the borders of documents and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from rapidformer_templates.data.streaming.rows import StreamedRow
from rapidformer_templates.data.streaming.samples import BlockResult
from rapidformer_templates.data.text.encoding import Encoder, EncodingJob, EncodingRecipe
from rapidformer_templates.data.text.fast_tokenizers import NotEquivalent
from rapidformer_templates.data.types import Rows


class WindowsOfDocuments:
    """Makes windows from documents, one per row. The rest at the end starts the first window of the next block.

    An item has ``input_ids`` of shape (length + overlap,). With ``marks_documents`` it also has ``documents`` of that
    shape: a number that changes where a document begins. The items are like those of :class:`GPTSamples`, except for
    the order.

    Args:
        recipe: how text becomes tokens, with an end token.
        length: tokens from the beginning of one window to the beginning of the next.
        overlap: tokens that a window shares with the next one.
        marks_documents: also return ``documents``.
        shuffles: put the documents of a block into a random order.
    """

    def __init__(
        self, recipe: EncodingRecipe, length: int, *, overlap: int, marks_documents: bool = False, shuffles: bool = True
    ) -> None:
        self.recipe = recipe
        self.length, self.overlap = length, overlap
        self.marks_documents, self.shuffles = marks_documents, shuffles
        self._encoder: Encoder | None = None

    def __call__(
        self, rows: list[StreamedRow], remainder: list[list[int]] | None, generator: np.random.Generator
    ) -> BlockResult:
        skipped: list[str] = []
        documents = list(self._encoded(rows, skipped))
        if self.shuffles:
            documents = [documents[i] for i in generator.permutation(len(documents))]
        # The rest is a list of pieces of documents. The first piece began in an earlier window.
        pieces = [*map(np.asarray, remainder or []), *documents]
        tokens = np.concatenate([np.empty(0, np.int32), *pieces]).astype(np.int32)
        numbers = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        count = max(0, (len(tokens) - self.overlap) // self.length)
        columns = {"input_ids": self._windows(tokens, count)}
        if self.marks_documents:
            columns["documents"] = self._windows(numbers, count)
        rest, of = tokens[count * self.length :], numbers[count * self.length :]
        rest_of_documents = [piece.tolist() for piece in np.split(rest, np.flatnonzero(np.diff(of)) + 1)]
        return BlockResult(Rows(columns), rest_of_documents, skipped)

    def _encoded(self, rows: list[StreamedRow], skipped: list[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of each row, file by file in their order."""
        for path, group in groupby(rows, key=lambda row: row.path):
            part = [(row.number, row.row or {}) for row in group]
            if self._encoder is None:
                # Use the tokenizer with a cache of pieces if it equals the plain one, also on the first rows.
                try:
                    encoder = Encoder(replace(self.recipe, way="pieces", skip=True))
                    encoder(EncodingJob(path, part, 0, check=True))
                    encoder.recipe = self.recipe
                except NotEquivalent:
                    encoder = Encoder(self.recipe)
                self._encoder = encoder
            encoded = self._encoder(EncodingJob(path, part, 0, check=False))
            skipped += encoded.skipped
            yield from np.split(encoded.columns[0].tokens, np.cumsum(encoded.columns[0].lengths)[:-1])

    def _windows(self, flat: np.ndarray, count: int) -> np.ndarray:
        """Return ``count`` windows as rows of a new array. A view would keep the whole block in memory."""
        if not count:
            return np.empty((0, self.length + self.overlap), flat.dtype)
        windows = np.lib.stride_tricks.sliding_window_view(flat, self.length + self.overlap)[:: self.length]
        return windows[:count].copy()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_encoder": None}
