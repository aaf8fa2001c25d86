"""Tokenizers as functions from texts to ids: the one of transformers, and faster ones that are proven equal.

- ``gigatoken``, the package (the extra ``fast-bpe``), splits and merges byte-level BPE many times faster.
- ``pieces`` splits texts where every usual splitting rule does. transformers' tokenizer then sees each piece once.
- ``reference`` is transformers' own tokenizer on whole texts. It is the reference.

The first two are only used if they give the ids of the third on hard texts and on a part of the corpus.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

COMPARED = 1 << 20
"""Number of characters, from the beginning of a text, on which two tokenizers are compared."""


EncodingMethod = Literal["gigatoken", "pieces", "whole"]


Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
"""Returns (ids of all texts one after another, number of ids of each text), without special tokens."""


class NotEquivalent(Exception):
    """A fast tokenizer does not equal the one of transformers and must not be used."""


def is_installed() -> bool:
    return importlib.util.find_spec("gigatoken") is not None


class Reference:
    """The tokenizer of transformers, run by the tokenizers library.

    Args:
        description: contents of its ``tokenizer.json``.
    """

    def __init__(self, description: str) -> None:
        self.tokenizer = Tokenizer.from_str(description)
        # A tokenizer may truncate long texts, as those of sentence encoders do.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.added = [str(token.content) for token in self.tokenizer.get_added_tokens_decoder().values()]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined([np.array(ids, dtype=np.uint32) for ids in self.ids(texts)])


_REST = r"[^\sA-Za-z0-9]*(?:[A-Za-z0-9]+(?:[^\s!-&(-~][^\sA-Za-z0-9]*)?)*"
PIECE = re.compile(rf"\s*{_REST}(?:[^\S \t\n\r]\s*{_REST})*")
"""Matches one piece of text.

It ends between a visible character and a blank, a tab or a line end, or between an ASCII letter or digit and an ASCII
punctuation mark other than an apostrophe.
"""


class CachedPieces:
    """The same tokenizer, applied once to each distinct piece of text.

    Args:
        reference: the tokenizer.

    Attributes:
        doubtful: tokens of the vocabulary that cross a place where texts are split. Some never occur in a text, such as
            BERT's ``[unused0]``. Others show that this method gives different ids.
    """

    ROOM = 1 << 24
    """Maximum weight of the cached pieces, about 100,000 of them. Beyond it the cache is cleared."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        # A special token can mix letters and marks, and must not be split.
        self.added = re.compile("|".join(map(re.escape, reference.added))) if reference.added else None
        self.cache: dict[str, list[int]] = {}
        self.weight = 0
        tokenizer = reference.tokenizer
        vocabulary = sorted(set(range(tokenizer.get_vocab_size())) - set(tokenizer.get_added_tokens_decoder()))
        tokens = tokenizer.decode_batch([[token] for token in vocabulary])
        self.doubtful = [text for text in tokens if len(PIECE.findall(text)) > 2]  # the last piece is always empty

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self.weight > self.ROOM:
            self.cache.clear()
            self.weight = 0
        pieces = [[text] if self.added and self.added.search(text) else PIECE.findall(text) for text in texts]
        new = [piece for piece in dict.fromkeys(chain.from_iterable(pieces)) if piece not in self.cache]
        self.cache.update(zip(new, self.reference.ids(new), strict=True))
        self.weight += sum(map(len, new)) + 150 * len(new)
        cached = self.cache.__getitem__
        return _joined([np.fromiter(chain.from_iterable(map(cached, text)), np.uint32) for text in pieces])


class Gigatoken:
    """The tokenizer of the package ``gigatoken``.

    Args:
        description: contents of the ``tokenizer.json`` of a byte-level BPE.

    Raises:
        NotEquivalent: it does not support this tokenizer.
    """

    def __init__(self, description: str) -> None:
        import gigatoken

        try:
            self.backend = gigatoken.Tokenizer.from_json(description).backend
        except Exception as error:  # it raises many kinds of errors
            reason = str(error).partition("\n")[0]  # the rest are locations in its own source
            raise NotEquivalent(f"it cannot read this tokenizer: {reason}") from error

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined([self.backend.encode(text.encode()) for text in texts])


def _joined(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths


def compare(fast: Encode, reference: Encode, texts: Sequence[str], where: str) -> int:
    """Check that two tokenizers give the same ids for some texts, and return the number of tokens.

    Args:
        fast, reference: the two tokenizers.
        texts: the first :data:`COMPARED` characters of each are used.
        where: the source of the texts, for the message.

    Raises:
        NotEquivalent: the ids differ. The message names the first such text.
    """
    texts = [text[:COMPARED] for text in texts]
    (ids, lengths), (right, right_lengths) = fast(texts), reference(texts)
    if np.array_equal(ids, right) and np.array_equal(lengths, right_lengths):
        return len(right)
    ends, right_ends = np.cumsum(lengths), np.cumsum(right_lengths)
    for number, text in enumerate(texts):
        row_ids = ids[ends[number] - lengths[number] : ends[number]]
        if not np.array_equal(row_ids, right[right_ends[number] - right_lengths[number] : right_ends[number]]):
            raise NotEquivalent(f"it gives other tokens in {where}, text {number + 1}: {text[:60]!r}")
    raise AssertionError("the same ids of each text, but not of all")


ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " ",
    "\t\n\r\v\f\x1c\x1f",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "\x00\x01\x07\x7f\x80\x85\xad\xa0",
    "àéîõüßñçøåÆŒſİıǅ",
    "αβγΩάбвгЯёשלוםمرحبا٣٤",
    "नमस्ते१२ไทยကမ္ဘာ",
    "日本語中文かなカナ한국어！。、「」",
    "\u0301\u0308\u200b\u200c\u200d\u2028\u2029\u3000\ufeff\u2009\u202f",
    "😀👩‍💻🏳️‍🌈🇩🇪½²Ⅷ₃①",
    "\ue000\ufffd\uffff\U00010000\U000e0001\U0010ffff",
)
ENDINGS = ("'s", "'t", "'re", "'VE", "'LL", "’s", "\r\n", "\n\n\n", "    ", "  \n  ")


def hard_texts(added: Sequence[str], count: int = 3000) -> list[str]:
    """Generate texts with runs of similar characters, which are hard for splitting rules. Each call returns the same.

    Args:
        added: special and added tokens of the tokenizer. Some texts contain them.
        count: number of texts.
    """
    chance = random.Random(0)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(chance.randint(1, 8)):
            kind = chance.random()
            if kind < 0.12:
                parts.append(chance.choice(ENDINGS))
            elif kind < 0.17 and added:
                parts.append(chance.choice(added))
            else:
                parts.append("".join(chance.choices(chance.choice(ALPHABETS), k=chance.randint(1, 6))))
        texts.append("".join(parts))
    return texts


def verified(way: EncodingMethod, description: str) -> tuple[Encode, Reference]:
    """Return a tokenizer that gives the ids of the reference on :func:`hard_texts`, and the reference.

    Raises:
        NotEquivalent: the ids differ.
    """
    reference = Reference(description)
    if way == "whole":
        return reference, reference
    texts, fast = hard_texts(reference.added), CachedPieces(reference) if way == "pieces" else Gigatoken(description)
    if isinstance(fast, CachedPieces):
        texts += [around + text for text in fast.doubtful for around in ("", "a", " ")]
    compare(fast, reference, texts, "made-up hard texts")
    return fast, reference
