"""Samples of a corpus for pretraining: windows of its tokens, and pairs of its sentences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

import numpy as np

from rapidformer_templates.data.indexed.corpora import IndexCache, Tables, contents
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.order import NewestEpochs, Stream
from rapidformer_templates.data.pretraining.masking import MaskTokens
from rapidformer_templates.data.types import Rows
from rapidformer_templates.errors import DataError, NoSamples
from rapidformer_templates.models.architectures import PairLabel
from rapidformer_templates.system.files import hash_of

WINDOWS_VERSION, PAIRS_VERSION = 2, 1
"""Parts of the names of tables. Increase one when the meaning of these tables changes."""


@dataclass(eq=False)
class GPTSamples:
    """Samples of some documents of an indexed data set, in training order.

    There is an item ``p`` for every ``p`` from 0 on. Its epoch is ``p // len``. An item has ``input_ids`` with the
    dtype of the data set and shape (length + overlap,). With ``marks_documents`` it also has ``documents`` of that
    shape: a number that changes where a document begins.

    Attributes:
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

    dataset: IndexedDataset
    part: tuple[int, int]
    length: int
    seed: int
    _: KW_ONLY
    overlap: int = 1
    marks_documents: bool = False
    cache: IndexCache = field(default_factory=IndexCache)

    def __post_init__(self) -> None:
        span = self.dataset.span(*self.part)
        self.tokens = span.stop - span.start
        self.samples = max(0, (self.tokens - self.overlap) // self.length)
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
        name = "gpt-" + hash_of([WINDOWS_VERSION, self.dataset.version, *shape])
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


BLOCK = 1 << 20
"""Number of sentences that are processed at a time (or one document, if it has more). It limits the memory."""


@dataclass(eq=False)
class SentencePairs:
    """Pairs ``[CLS] A [SEP] B [SEP]`` from a data set whose sequences are sentences.

    ``len`` is the number of samples per epoch. The epoch of item ``p`` ≥ 0 is ``p // len``. A sample is a dict of
    ``input_ids``, ``token_type_ids`` (0 up to the first ``[SEP]``, then 1), ``labels`` (-100 where nothing is masked)
    and the label of the pair: 0 if B follows A, 1 if not. It depends only on the seed and its position.

    Attributes:
        dataset: sentences, several per document.
        documents: the first document and the one after the last.
        seq_length: maximum number of tokens per sample.
        mask: masks tokens.
        cls_token_id, sep_token_id: special tokens around A and B.
        short_probability: fraction of chunks with a shorter target length, uniform from 2 tokens.
        label: the kind of pair that is not consecutive. With ``next_sentence_label`` B comes from another document.
            With ``sentence_order_label`` A and B are swapped.
        seed: seed of everything random.
        cache: stores the chunks and the order of each epoch.

    Documents with one sentence give no pair, but may provide a B for another document's A.

    Raises:
        DataError: the length is too short.
        NoSamples: no document has two sentences, or there is no second document to take a B from.
    """

    in_order = True
    lengths = None
    """Unknown in advance, because a B from another document may be shorter."""

    dataset: IndexedDataset
    documents: tuple[int, int]
    seq_length: int
    mask: MaskTokens
    _: KW_ONLY
    cls_token_id: int
    sep_token_id: int
    short_probability: float
    seed: int
    label: PairLabel = "next_sentence_label"
    cache: IndexCache = field(default_factory=IndexCache)

    def __post_init__(self) -> None:
        if self.seq_length < 5:
            message = f"a pair of sentences does not fit into {self.seq_length} tokens"
            raise DataError(message, where="--seq-length", hint="use at least 5")
        self.content = self.seq_length - 3
        self._orders = NewestEpochs(self._order)
        dataset, (first, last) = self.dataset, self.documents
        if (np.diff(dataset.documents[first : last + 1]) == 1).all():
            message = f"none of the {last - first:,} documents has two sentences"
            hint = "make the set with rapidformer data preprocess --split-sentences, or train on windows of the text"
            raise NoSamples(message, where=dataset.prefix, hint=hint)
        if last - first < 2 and self.label == "next_sentence_label":
            message = "there is only one document, so there is no other one to take a second sentence from"
            raise NoSamples(message, where=dataset.prefix, hint="use more documents or other shares of --split")

    @cached_property
    def chunks(self) -> np.ndarray:
        """First sentence, the one after the last, and target length of each chunk: int64, shape (chunks, 3)."""
        facts = self.dataset, self.documents, self.content, self.short_probability, self.seed
        return self.cache(self._name("chunks"), lambda: {"chunks": build_chunks(*facts)})["chunks"]

    def _name(self, *table: object) -> str:
        facts = [self.dataset.version, self.documents, self.content, self.short_probability, self.seed]
        return "pairs-" + hash_of([PAIRS_VERSION, *facts, *table])

    @property
    def identity(self) -> str:
        """Everything except the seed that the samples depend on. A resumed run must have the same."""
        return f"{len(self)} sentence pairs of up to {self.content + 3} tokens{contents(self.dataset)}"

    @property
    def mean_tokens(self) -> float:
        """Mean length of the samples without special tokens, as if B always followed A."""
        first, end, target = self.chunks.T
        pointers, last = self.dataset.pointers, end - 1
        lengths = (pointers[last] - pointers[first]) // self.dataset.dtype.itemsize + self.dataset.lengths[last]
        return float(np.minimum(lengths, target).mean())

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, position: int) -> dict[str, np.ndarray | int]:
        if position < 0:
            position = range(len(self))[position]
        first, end, target = self.chunks[self._orders[position // len(self)][position % len(self)]].tolist()
        generator = np.random.default_rng((self.seed, Stream.PAIR_SAMPLES, position))
        border = int(generator.integers(first + 1, end))
        other = bool(generator.random() < 0.5)
        a, b = self._read(first, border), self._read(border, end)
        if other and self.label == "next_sentence_label":
            b = self._other_document(first, max(target - len(a), 1), generator)
        elif other:
            a, b = b, a
        keep_a, keep_b = truncated_lengths(len(a), len(b), target)
        a, b = _truncate_at_random(a, keep_a, generator), _truncate_at_random(b, keep_b, generator)
        types = np.repeat([0, 1], [len(a) + 2, len(b) + 1])
        cls, sep = [self.cls_token_id], [self.sep_token_id]
        sample = {"input_ids": np.concatenate([cls, a, sep, b, sep]), "token_type_ids": types}
        return self.mask(sample, generator) | {self.label: int(other)}

    def _order(self, epoch: int) -> np.ndarray:
        """Draw the order of the chunks in an epoch."""
        generator = np.random.default_rng((self.seed, Stream.PAIR_ORDERS, epoch))
        return self.cache(self._name("order", epoch), lambda: {"order": generator.permutation(len(self))})["order"]

    def _read(self, first: int, end: int) -> np.ndarray:
        """Return the tokens of the sentences [first, end)."""
        return self.dataset.tokens[self.dataset.span(first, end)]

    def _other_document(self, sentence: int, tokens: int, generator: np.random.Generator) -> np.ndarray:
        """Return about ``tokens`` tokens from another document than that of ``sentence``, from a random sentence on."""
        (low, high), table = self.documents, self.dataset.documents
        own_document = int(np.searchsorted(table, sentence, side="right")) - 1
        document = int(generator.integers(low, high - 1))
        document += document >= own_document
        begin, limit = int(table[document]), int(table[document + 1])
        first = int(generator.integers(begin, limit))
        lengths = self.dataset.lengths[first : min(limit, first + tokens)]
        count = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), tokens)) + 1
        return self._read(first, first + min(count, len(lengths)))

    def __getstate__(self) -> dict[str, object]:
        # Tables would be sent to loader processes as copies. There they are read from the cache or rebuilt.
        return {name: value for name, value in self.__dict__.items() if name != "chunks"}


def build_chunks(
    dataset: IndexedDataset, documents: tuple[int, int], content: int, short_probability: float, seed: int
) -> np.ndarray:
    """Build the chunks of sentences of some documents, in order.

    A chunk has at least two sentences and ends once it reaches its target length: ``content`` tokens, or with
    ``short_probability`` a length from 2 to ``content``. If only one sentence of a document would be left, it is added
    to the last chunk. The time is O(sequences × log of the chunks in a document), vectorized over sentences.

    Returns:
        First sentence, the one after the last, and target length: int64, shape (chunks, 3).
    """
    bounds = dataset.documents[documents[0] : documents[1] + 1]
    generator = np.random.default_rng((seed, Stream.PAIR_CHUNKS))
    chunks = []
    # Process a limited number of sentences at a time.
    document, count = 0, len(bounds) - 1
    while document < count:
        stop = max(int(np.searchsorted(bounds, bounds[document] + BLOCK, side="right")) - 1, document + 1)
        chunks.append(_build_block_chunks(dataset, bounds[document : stop + 1], content, short_probability, generator))
        document = stop
    return np.concatenate(chunks)


def _build_block_chunks(
    dataset: IndexedDataset, bounds: np.ndarray, content: int, short_probability: float, generator: np.random.Generator
) -> np.ndarray:
    begin, count = int(bounds[0]), int(bounds[-1] - bounds[0])
    sizes = np.diff(bounds)
    starts = dataset.pointers[begin : begin + count] // dataset.dtype.itemsize
    # Compute for every sentence the chunk that would begin there, then find the actual beginnings.
    target = np.full(count, content)
    short = generator.random(count) < short_probability
    target[short] = generator.integers(2, content + 1, size=int(short.sum()))
    limit = np.repeat(bounds[1:] - begin, sizes)
    end = np.maximum(np.searchsorted(starts, starts + target), np.arange(count) + 2)
    end = np.where(end >= limit - 1, limit, end)
    following = np.append(np.where(end == limit, count, end), count)  # ``count`` means none
    # Follow the chains of chunks from the first sentence of each document with several sentences. The steps along the
    # chains double in length, so the number of rounds is log2 of the longest chain.
    begins_chunk = np.zeros(count + 1, dtype=bool)
    begins_chunk[(bounds[:-1] - begin)[sizes > 1]] = True
    count_before = 0
    while count_before != (count_before := int(begins_chunk[:-1].sum())):
        begins_chunk[following[begins_chunk]] = True
        following = following[following]
    first = np.flatnonzero(begins_chunk[:-1])
    return np.stack([first + begin, end[first] + begin, target[first]], axis=1)


def truncated_lengths(a: int, b: int, limit: int) -> tuple[int, int]:
    """Return the lengths of two texts after removing tokens from the longer one (or the second) until they fit."""
    if a + b <= limit:
        return a, b
    if 2 * a <= limit:
        return a, limit - a
    if 2 * b <= limit:
        return limit - b, b
    return limit - limit // 2, limit // 2


def _truncate_at_random(tokens: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    """Keep ``length`` tokens. Each surplus token is removed from the front or the back with equal probability."""
    if len(tokens) == length:
        return tokens
    front = int(generator.binomial(len(tokens) - length, 0.5))
    return tokens[front : front + length]
