"""Converts lines of raw text to tokens of documents, in a worker process.

Imports neither torch nor transformers, so that a worker starts quickly.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from rapidformer_templates.data.text import files
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.fast_tokenizers import EncodingMethod, compare, verified

ABBREVIATED = re.compile(
    r"""
    (?: ^ | [\s(\["'“‘] )
    (?: [A-Z]  # an initial
      | (?i: mr | mrs | ms | dr | prof | st | sr | jr | rev | gen | col | lt | sgt | capt
           | vs | etc | e\.g | i\.e | cf | al | figs? | eqs? | nos? | vol | pp? | ch | sec | eds? | approx
           | inc | ltd | co | corp | dept
           | jan | feb | mar | apr | jun | jul | aug | sept? | oct | nov | dec )
    ) \. $
    """,
    re.VERBOSE,
)
BOUNDARY = re.compile(
    r"""
      \s*\n\s*\n\s*                        # a blank line
    | (?<=[.!?…]) \s+ (?![a-z])            # a mark, white space, and no lower-case letter
    | (?<=[.!?…]["'”’»)\]]) \s+ (?![a-z])  # the same with a closing quote or bracket
    | (?<=[。！？]) (?![。！？”」』）]) \s*  # marks that need no white space
    """,
    re.VERBOSE,
)


def split_sentences(text: str) -> list[str]:
    """Return the non-empty sentences of a text without the white space around them, by a rule that needs no data.

    A sentence ends at a blank line, and after ``.``, ``!``, ``?`` or ``…`` (including closing quotes and brackets)
    before white space. It does not end if a lower-case letter follows, or if a full stop belongs to a common
    abbreviation or a single initial. Chinese and Japanese marks end a sentence without white space.
    """
    sentences: list[str] = []
    start = 0
    for boundary in BOUNDARY.finditer(text):
        sentence = text[start : boundary.start()]
        if boundary.group().count("\n") < 2 and ABBREVIATED.search(sentence[-20:]):
            continue
        sentences.append(sentence)
        start = boundary.end()
    sentences.append(text[start:])
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


@dataclass(frozen=True)
class EncodingRecipe:
    """How text is processed. It is the same for the whole corpus.

    Attributes:
        tokenizer: contents of its ``tokenizer.json``.
        dtype: name of the dtype of the tokens.
        end: token after each document, or None.
        keys: columns with text.
        sentences: whether documents are split into sentences.
        skip: whether bad lines are left out.
        vocabulary: id of the vocabulary, which is stored with the tokens.
        way: how the tokenizer is run. See :mod:`~rapidformer_templates.data.text.fast_tokenizers`.
        keys_flag: the flag that names the columns, for messages.
        text_unit: the unit of text that is one document in a ``.txt`` file.
    """

    tokenizer: str
    dtype: str
    end: int | None
    keys: tuple[str, ...] = ("text",)
    sentences: bool = False
    skip: bool = False
    vocabulary: str | None = None
    way: EncodingMethod = "whole"
    keys_flag: str = "--json-keys"
    text_unit: files.TextUnit = "paragraph"


@dataclass(frozen=True)
class EncodingJob:
    """A part of the corpus.

    Attributes:
        path: its file.
        part: lines of the file, or rows that were already read, each with its position.
        bytes: its size, for the progress bar.
        check: whether the fast tokenizer is compared with the reference on it.
    """

    path: Path
    part: files.Span | list[tuple[int, files.Row]]
    bytes: int
    check: bool


@dataclass(frozen=True)
class Tokens:
    """The documents of one column.

    Attributes:
        tokens: tokens of all sequences, one after another.
        lengths: number of tokens in each sequence, never 0.
        sequences: number of sequences in each document. None means one each.
        empty: number of documents without tokens, which were left out.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray | None
    empty: int


@dataclass
class Encoded:
    """The result of a job.

    Attributes:
        columns: the documents of each key, in the order of the keys.
        skipped: ``file:line: reason`` of the lines that were left out.
        compared: number of tokens on which the fast tokenizer and the reference agreed.
    """

    columns: list[Tokens] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    compared: int = 0


class Encoder:
    """Tokenizes jobs.

    Raises:
        NotEquivalent: the fast tokenizer does not equal the one of transformers.
    """

    def __init__(self, recipe: EncodingRecipe) -> None:
        self.recipe = recipe
        self.encode, self.reference = verified(recipe.way, recipe.tokenizer)

    def __call__(self, job: EncodingJob) -> Encoded:
        """Tokenize a job.

        Raises:
            DataError: a line cannot be used.
            NotEquivalent: the fast tokenizer gave other tokens than the reference.
        """
        bad = BadLines(skip=self.recipe.skip)
        part: Iterable[tuple[int, files.Row]]
        if isinstance(job.part, files.Span):  # the text of a text file belongs to the first key
            part = files.raw_rows(job.path, self.recipe.keys[0], bad, job.part, self.recipe.text_unit)
        else:
            part = job.part
        rows = [texts for number, row in part if (texts := self._texts(row, job.path, number, bad))]
        bad.raise_all(is_part=True)  # other jobs may find more
        result = Encoded(skipped=bad.skipped)
        for column in range(len(self.recipe.keys)):
            texts = [row[column] for row in rows]
            if job.check and self.encode is not self.reference:
                flat = [sentence for text in texts for sentence in text]
                result.compared += compare(self.encode, self.reference, flat, str(job.path))
            result.columns.append(self._tokens(texts))
        return result

    def _texts(self, row: files.Row, path: Path, number: int, bad: BadLines) -> list[list[str]] | None:
        """Return the sentences (or the single text) of each key. None if the row cannot be used."""
        columns = []
        for key in self.recipe.keys:
            value = row.get(key)
            if isinstance(value, str):
                texts = split_sentences(value) if self.recipe.sentences else [value]
            elif self.recipe.sentences and isinstance(value, list) and all(isinstance(part, str) for part in value):
                texts = value
            else:
                files.note_column(row, key, self.recipe.keys_flag, path, number, bad)
                return None
            if files.has_half_character("".join(texts)):
                bad.note(path, number, f"the column '{key}' {files.HALF_CHARACTER}")
                return None
            columns.append([text for text in texts if not text.isspace()])
        return columns

    def _tokens(self, documents: Sequence[Sequence[str]]) -> Tokens:
        ids, lengths = self.encode([text for document in documents for text in document])
        owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])[lengths > 0]
        lengths = lengths[lengths > 0]
        sequences = np.bincount(owner, minlength=len(documents))
        sequences = sequences[sequences > 0]
        if self.recipe.end is not None and len(lengths):
            last = np.cumsum(sequences) - 1
            ids = np.insert(ids, np.cumsum(lengths)[last], self.recipe.end)
            lengths[last] += 1
        return Tokens(
            ids.astype(self.recipe.dtype),
            lengths.astype(np.int32),
            sequences if self.recipe.sentences else None,
            len(documents) - len(sequences),
        )


_encoders: list[Callable[[], Encoder]] = []
"""Makes the tokenizer of this worker process at its first job, and keeps it."""


def start_worker(recipe: EncodingRecipe, alive: Connection) -> None:
    """Make this process a worker. It exits at once if the other end of ``alive`` is closed or its process dies."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also gets the signal, and ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoders.append(cache(lambda: Encoder(recipe)))

    def exit_with_parent() -> None:
        try:
            alive.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def work(job: EncodingJob) -> Encoded:
    """Run a job in a worker process."""
    return _encoders[0]()(job)
