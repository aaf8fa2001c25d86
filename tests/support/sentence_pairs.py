"""Data sets of sentence pairs in which a token's id shows where the token is from."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import BertTokenizer

from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.pretraining.masking import MaskTokens
from rapidformer_templates.data.pretraining.samples import SentencePairs

CLS, SEP, FIRST, FEW, WORDS = 2, 3, 5, 2000, 20_000

Corpus = list[list[int]]

"""The lengths of each document's sentences."""


def tokenizer_of(words: int) -> BertTokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return BertTokenizer(vocab={word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(words))])})


def write(corpus: Corpus, folder: Path) -> IndexedDataset:
    """Write a data set in which a token's id is its position in the stream, so that the id shows where it is from."""
    lengths = np.asarray([length for document in corpus for length in document])
    assert lengths.sum() <= WORDS
    with IndexedWriter(folder / "set", np.uint16, overwrite=True) as writer:
        writer.add(FIRST + np.arange(lengths.sum()), lengths, np.asarray([len(document) for document in corpus]))
    return IndexedDataset(folder / "set")


def make(dataset: IndexedDataset, mask: MaskTokens, seq_length: int = 43, **changes: Any) -> SentencePairs:
    given = {"cls_token_id": CLS, "sep_token_id": SEP, "short_probability": 0.0, "seed": 7} | changes
    part = given.pop("documents", (0, len(dataset.documents) - 1))
    return SentencePairs(dataset, part, seq_length, mask, **given)


def some_corpus(documents: int, seed: int = 0) -> Corpus:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 15, size=generator.integers(1, 12)).tolist() for _ in range(documents)]
