"""Sentence pairs, the pretraining objective of BERT (Devlin et al. 2019, section 3.1 and appendix A.2).

Consecutive sentences of a document form chunks, and a chunk is split into A and B. In half of the samples, B is
replaced by a text from another document (next sentence), or A and B are swapped (sentence order: Lan et al. 2020,
section 3.1). A second head learns to detect this.

Chunks are built once. Every sentence of a document with two or more sentences is in exactly one chunk, and an epoch
always has the same samples. The split of a chunk, the replacement of B, and the masks are drawn again at each position.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rapidformer_templates.data.indexed.cache import IndexCache, Tables, contents, identity
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.order import NewestEpochs, Stream
from rapidformer_templates.data.pretraining.masking import MaskTokens, check_short_probability
from rapidformer_templates.errors import DataError, NoSamples
from rapidformer_templates.models.architectures import PairLabel
from rapidformer_templates.system.files import hash_of

TABLES_VERSION = 1
"""Part of the tables' names. Increase it when their meaning changes."""

BLOCK = 1 << 20
"""Number of sentences that are processed at a time (or one document, if it has more). It limits the memory."""


class SentencePairs:
    """Pairs ``[CLS] A [SEP] B [SEP]`` from a data set whose sequences are sentences.

    ``len`` is the number of samples per epoch. The epoch of item ``p`` ≥ 0 is ``p // len``. A sample is a dict of
    ``input_ids``, ``token_type_ids`` (0 up to the first ``[SEP]``, then 1), ``labels`` (-100 where nothing is masked)
    and the label of the pair: 0 if B follows A, 1 if not. It depends only on the seed and its position.

    Args:
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

    Attributes:
        single: number of documents with one sentence. They give no pair, but may provide a B for another document's A.

    Raises:
        DataError: the length is too short, or ``short_probability`` is not a fraction.
        NoSamples: no document has two sentences, or there is no second document to take a B from.
    """

    in_order = True
    lengths = None
    """Unknown in advance, because a B from another document may be shorter."""

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: tuple[int, int],
        seq_length: int,
        mask: MaskTokens,
        *,
        cls_token_id: int,
        sep_token_id: int,
        short_probability: float,
        seed: int,
        label: PairLabel = "next_sentence_label",
        cache: IndexCache | None = None,
    ) -> None:
        if seq_length < 5:
            message = f"a pair of sentences does not fit into {seq_length} tokens"
            raise DataError(message, where="--seq-length", hint="use at least 5")
        check_short_probability(short_probability)
        self.dataset = dataset
        self.documents = documents
        self.content = seq_length - 3
        self.mask = mask
        self.cls, self.sep = [cls_token_id], [sep_token_id]
        self.short_probability = short_probability
        self.seed = seed
        self.label = label
        self.cache = cache or IndexCache()
        self._orders = NewestEpochs(self._order)
        first, last = documents
        sizes = np.diff(dataset.documents[first : last + 1])
        self.single = int((sizes == 1).sum())
        if self.single == last - first:
            message = f"none of the {last - first:,} documents has two sentences"
            hint = "make the set with rapidformer data preprocess --split-sentences, or train on windows of the text"
            raise NoSamples(message, where=dataset.prefix, hint=hint)
        if last - first < 2 and label == "next_sentence_label":
            message = "there is only one document, so there is no other one to take a second sentence from"
            raise NoSamples(message, where=dataset.prefix, hint="use more documents or other shares of --split")

    @cached_property
    def chunks(self) -> np.ndarray:
        """First sentence, the one after the last, and target length of each chunk: int64, shape (chunks, 3)."""

        def make() -> Tables:
            share, seed = self.short_probability, self.seed
            return {"chunks": build_chunks(self.dataset, self.documents, self.content, share, seed)}

        return self.cache(self._name("chunks"), make)["chunks"]

    def _name(self, *table: object) -> str:
        facts = [identity(self.dataset.prefix), self.documents, self.content, self.short_probability, self.seed]
        return "pairs-" + hash_of([TABLES_VERSION, *facts, *table])

    @property
    def identity(self) -> str:
        """Everything except the seed that the samples depend on. A resumed run must have the same."""
        return f"{len(self)} sentence pairs of up to {self.content + 3} tokens{contents(self.dataset)}"

    @property
    def mean_tokens(self) -> float:
        """Mean length of the samples without special tokens, as if B always followed A."""
        first, end, target = self.chunks.T
        return float(np.minimum(self._tokens_between(first, end), target).mean())

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
        sample = {"input_ids": np.concatenate([self.cls, a, self.sep, b, self.sep]), "token_type_ids": types}
        return self.mask(sample, generator) | {self.label: int(other)}

    def _order(self, epoch: int) -> np.ndarray:
        """Draw the order of the chunks in an epoch."""
        generator = np.random.default_rng((self.seed, Stream.PAIR_ORDERS, epoch))
        return self.cache(self._name("order", epoch), lambda: {"order": generator.permutation(len(self))})["order"]

    def _read(self, first: int, end: int) -> np.ndarray:
        """Return the tokens of the sentences [first, end)."""
        start = int(self.dataset.pointers[first]) // self.dataset.dtype.itemsize
        return self.dataset.tokens[start : start + int(self._tokens_between(first, end))]

    def _tokens_between(self, first: int | np.ndarray, end: int | np.ndarray) -> np.ndarray:
        """Return the number of tokens of the sentences [first, end), which are stored one after another."""
        pointers = self.dataset.pointers
        # Use the length of the last sentence, because the next pointer may not exist.
        return (pointers[end - 1] - pointers[first]) // self.dataset.dtype.itemsize + self.dataset.lengths[end - 1]

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
