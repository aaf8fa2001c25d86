"""Tokenizers as functions from texts to ids: that of transformers, and faster ways once they are proven equal.

- ``gigatoken``, the package (the extra ``fast-bpe``), splits and merges byte-level BPE many times faster.
- ``pieces`` cuts texts where every usual splitting rule does, and lets transformers' tokenizer see each piece once.
- ``whole`` is transformers' own, text by text: the reference.

Nothing is taken on trust: on hard texts and on a share of the corpus the first two must give the ids of the third.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np
from tokenizers import Tokenizer

COMPARED = 1 << 20
"""Characters of a text, from its beginning, on which the two are compared."""


Way = Literal["gigatoken", "pieces", "whole"]


class Encode(Protocol):
    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts one after another, number of ids of each), without tokens put around a text."""
        ...


class Differs(Exception):
    """A fast way is not that of transformers' tokenizer: it must not be used."""


def is_installed() -> bool:
    return importlib.util.find_spec("gigatoken") is not None


class Whole:
    """The tokenizer of transformers, by its own library.

    Args:
        description: contents of its ``tokenizer.json``.
    """

    def __init__(self, description: str) -> None:
        self.tokenizer = Tokenizer.from_str(description)
        # A description may cut long texts, as that of a sentence encoder does.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.added = [str(token.content) for token in self.tokenizer.get_added_tokens_decoder().values()]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined([np.array(ids, dtype=np.uint32) for ids in self.ids(texts)])


_REST = r"[^\sA-Za-z0-9]*(?:[A-Za-z0-9]+(?:[^\s!-&(-~][^\sA-Za-z0-9]*)?)*"
PIECE = re.compile(rf"\s*{_REST}(?:[^\S \t\n\r]\s*{_REST})*")
"""Text up to the next place where a visible character stands before a blank, a tab or the end of a line, or a letter or
digit of ASCII before a mark of ASCII that is no apostrophe."""


class Pieces:
    """The same tokenizer on the pieces of a text, each different one only once.

    Args:
        whole: the tokenizer.

    Attributes:
        doubtful: tokens of the vocabulary that reach over a place where texts are cut: some can never come of a text,
            such as BERT's ``[unused0]``, and others show that this way is not the same.
    """

    ROOM = 1 << 24
    """Weight of the pieces that are remembered, about that of 100,000; then all are forgotten."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        # A special token can have letters beside marks, and must not be cut.
        self.added = re.compile("|".join(map(re.escape, whole.added))) if whole.added else None
        self.known: dict[str, list[int]] = {}
        self.weight = 0
        tokenizer = whole.tokenizer
        own = sorted(set(range(tokenizer.get_vocab_size())) - set(tokenizer.get_added_tokens_decoder()))
        tokens = tokenizer.decode_batch([[token] for token in own])
        self.doubtful = [text for text in tokens if len(PIECE.findall(text)) > 2]  # the last piece is always empty

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self.weight > self.ROOM:
            self.known.clear()
            self.weight = 0
        pieces = [[text] if self.added and self.added.search(text) else PIECE.findall(text) for text in texts]
        new = [piece for piece in dict.fromkeys(chain.from_iterable(pieces)) if piece not in self.known]
        self.known.update(zip(new, self.whole.ids(new), strict=True))
        self.weight += sum(map(len, new)) + 150 * len(new)
        known = self.known.__getitem__
        return _joined([np.fromiter(chain.from_iterable(map(known, text)), np.uint32) for text in pieces])


class Gigatoken:
    """The package of this name.

    Args:
        description: contents of the ``tokenizer.json`` of a byte-level BPE.

    Raises:
        Differs: it has no form for this tokenizer.
    """

    def __init__(self, description: str) -> None:
        import gigatoken

        try:
            self.backend = gigatoken.Tokenizer.from_json(description).backend
        except Exception as error:  # its errors are of many kinds
            reason = str(error).partition("\n")[0]  # places in its own source follow
            raise Differs(f"it cannot read this tokenizer: {reason}") from error

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined([self.backend.encode(text.encode()) for text in texts])


def _joined(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths


def compare(fast: Encode, reference: Encode, texts: Sequence[str], where: str) -> int:
    """Tokenize the texts in both ways; the number of tokens that are the same.

    Args:
        fast, reference: the two ways.
        texts: of each, the first :data:`COMPARED` characters are taken.
        where: the texts are from, for the message.

    Raises:
        Differs: the ids differ; the first such text is named.
    """
    texts = [text[:COMPARED] for text in texts]
    (ids, lengths), (right, right_lengths) = fast(texts), reference(texts)
    if np.array_equal(ids, right) and np.array_equal(lengths, right_lengths):
        return len(right)
    ends, right_ends = np.cumsum(lengths), np.cumsum(right_lengths)
    for number, text in enumerate(texts):
        own = ids[ends[number] - lengths[number] : ends[number]]
        if not np.array_equal(own, right[right_ends[number] - right_lengths[number] : right_ends[number]]):
            raise Differs(f"it gives other tokens in {where}, text {number + 1}: {text[:60]!r}")
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
    """Made-up texts of runs of like characters, in which splitting rules go wrong; the same at every call.

    Args:
        added: special and added tokens of the tokenizer, which stand in some of them.
        count: how many.
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


def proven(way: Way, description: str) -> tuple[Encode, Whole]:
    """A way, after it gave the ids of the reference on :func:`hard_texts`; and the reference.

    Raises:
        Differs: it did not.
    """
    whole = Whole(description)
    if way == "whole":
        return whole, whole
    texts, fast = hard_texts(whole.added), Pieces(whole) if way == "pieces" else Gigatoken(description)
    if isinstance(fast, Pieces):
        texts += [around + text for text in fast.doubtful for around in ("", "a", " ")]
    compare(fast, whole, texts, "made-up hard texts")
    return fast, whole
