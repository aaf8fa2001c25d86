"""Megatron's indexed data sets: ``PREFIX.bin`` with tokens, ``PREFIX.idx`` with the positions of documents.

The format is little-endian. ``.bin`` has the tokens of all sequences, one after another. ``.idx`` has:

====================  ==================================================================
9 bytes               ``MMIDIDX\\0\\0``
uint64                version, 1
uint8                 dtype of the tokens, see :data:`TYPES`
uint64, uint64        number of sequences, length of the document table
int32 per sequence    its length, tokens
int64 per sequence    where it begins in ``.bin``, bytes
int64 per entry       document table: the first sequence of each document, and the number of sequences
int8 per sequence     mode (multimodal sets only, ignored)
====================  ==================================================================

A document is one sequence, or several if a corpus was split into sentences. Both files are fully checked when a set
is opened. A reader that trusts the pointers of a truncated file would silently train on other tokens.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rapidformer_templates.data.text.files import prefix_of
from rapidformer_templates.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = dict(enumerate(map(np.dtype, ("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")), start=1))
"""Maps the code in the header to the dtype of the tokens."""

CHUNK = 1 << 22
"""Number of table entries that are checked at a time. It limits the memory."""

Access = Literal["mmap", "lazy", "cached", "infer"]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def is_indexed(path: str | Path) -> bool:
    """Return whether one of the two files of a set exists."""
    prefix = prefix_of(path)
    return bin_path(prefix).is_file() or idx_path(prefix).is_file()


def type_for(vocabulary: int) -> np.dtype:
    """Return the dtype that Megatron-LM uses for a vocabulary size: uint16 below 65,500, else int32."""
    return np.dtype(np.uint16 if vocabulary < 65500 else np.int32)


class _FileTokens:
    """Tokens that are read from the file at each access ``[start:stop]``, where memory maps are not supported."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._dtype = dtype

    def __getitem__(self, span: slice) -> np.ndarray:
        size = self._dtype.itemsize
        data = os.pread(self._descriptor, (span.stop - span.start) * size, span.start * size)
        return np.frombuffer(data, dtype=self._dtype)

    def __del__(self) -> None:
        os.close(self._descriptor)


class IndexedDataset:
    """An indexed data set, open for reading. ``len`` is its number of sequences, and an item is the tokens of one.

    Args:
        prefix: the path without ``.bin`` or ``.idx``.
        access: ``mmap`` maps the tokens into memory. ``cached`` reads all of them into memory. ``lazy`` reads each
            sequence from the file when it is accessed. ``infer`` maps them, or reads them lazily if the file system
            does not support maps.

    Attributes:
        lengths: tokens of each sequence, int32, shape (sequences,).
        pointers: byte at which each begins, int64, shape (sequences,).
        documents: first sequence of each document, and the number of sequences, int64, shape (documents + 1,).
        dtype: dtype of the tokens.
        has_modes: whether each sequence has a mode, as in multimodal sets.
        tokens: the tokens of all sequences, by slices.

    Raises:
        DataError: a file is missing, has another format or version, is truncated, or the two do not match.
    """

    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    dtype: np.dtype
    has_modes: bool
    tokens: np.ndarray | _FileTokens

    def __init__(self, prefix: str | Path, access: Access = "mmap") -> None:
        self.prefix = prefix_of(prefix)
        self.access = access
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            if not path.is_file():
                hint = "an indexed data set is two files, PREFIX.bin and PREFIX.idx; rapidformer data preprocess"
                raise DataError(f"{path} does not exist", where=self.prefix, hint=f"{hint} makes them")
        self._read_index()
        self._check()
        self.tokens = self._open_tokens()

    def _read_index(self) -> None:
        path = idx_path(self.prefix)
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if head.startswith(OLD_MAGIC):
            hint = "make the set again from its text with rapidformer data preprocess"
            raise DataError("the index has the older format TNTIDX, not MMIDIDX", where=str(path), hint=hint)
        if not MAGIC.startswith(head[: len(MAGIC)]):
            raise DataError("this is not an index in Megatron's format (MMIDIDX)", where=str(path), hint=_ANEW)
        if len(head) < HEADER.size:
            message = f"the index is truncated: {size} bytes are less than its header"
            raise DataError(message, where=str(path), hint=_ANEW)
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != VERSION:
            message = f"the index has version {version}; only {VERSION} is supported"
            raise DataError(message, where=str(path), hint=_ANEW)
        if code not in TYPES:
            raise DataError(f"the index has an unknown token type (code {code})", where=str(path), hint=_ANEW)
        self.dtype = TYPES[code]
        needed = HEADER.size + 12 * sequences + 8 * entries
        if size not in (needed, needed + sequences):
            what = "truncated" if size < needed else "too long"
            counts = f"{sequences:,} sequences and {entries:,} entries of documents"
            message = f"the index is {what}: {counts} need {needed:,} bytes, the file has {size:,}"
            raise DataError(message, where=str(path), hint=_ANEW)
        self.has_modes = size != needed
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = HEADER.size
        self.lengths = np.frombuffer(buffer, "<i4", sequences, begin)
        self.pointers = np.frombuffer(buffer, "<i8", sequences, begin + 4 * sequences)
        self.documents = np.frombuffer(buffer, "<i8", entries, begin + 12 * sequences)
        # Views that return Python integers. For single sequences they are several times faster than numpy's.
        tables, split = memoryview(buffer)[begin:], 4 * sequences
        self._sizes, self._starts = tables[:split].cast("i"), tables[split : 3 * split].cast("q")
        self._shift = self.dtype.itemsize.bit_length() - 1

    def _check(self) -> None:
        """Compare the three tables with each other and with the size of the tokens, in constant memory."""
        idx, size = idx_path(self.prefix), bin_path(self.prefix).stat().st_size
        if len(self.documents) < 1 or self.documents[0] != 0 or self.documents[-1] != len(self.lengths):
            raise DataError("the document table does not cover the sequences", where=str(idx), hint=_ANEW)
        for first in range(0, len(self.documents) - 1, CHUNK):
            steps = np.diff(self.documents[first : first + CHUNK + 1])
            _refuse(steps <= 0, first, "has no tokens, or begins before the previous one", "document", idx)
        end = 0
        for first in range(0, len(self.lengths), CHUNK):
            lengths = self.lengths[first : first + CHUNK].astype(np.int64)
            _refuse(lengths == 0, first, "has no tokens", "sequence", idx)
            _refuse(lengths < 0, first, "has a negative length", "sequence", idx)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = ends - lengths * self.dtype.itemsize
            wrong = self.pointers[first : first + CHUNK] != begins
            _refuse(wrong, first, "does not begin where the previous one ends", "sequence", idx)
            end = int(ends[-1])
        if size != end:
            what = f"truncated: {size:,} bytes of {end:,}" if size < end else f"too long: {size:,} bytes, not {end:,}"
            raise DataError(f"the file of tokens is {what}", where=str(bin_path(self.prefix)), hint=_ANEW)

    def _open_tokens(self) -> np.ndarray | _FileTokens:
        path = bin_path(self.prefix)
        if self.access == "cached":
            return np.fromfile(path, dtype=self.dtype)
        if not len(self.lengths):
            return np.empty(0, dtype=self.dtype)
        if self.access == "lazy":
            return _FileTokens(path, self.dtype)
        try:
            with path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if self.access == "infer":
                return _FileTokens(path, self.dtype)
            hint = "read it with --data-impl lazy, or copy it to a local disk"
            raise DataError(f"the file cannot be mapped: {error}", where=str(path), hint=hint) from error
        return np.frombuffer(buffer, dtype=self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self._starts[index] >> self._shift
        return self.tokens[start : start + self._sizes[index]]

    def span(self, first: int, last: int) -> slice:
        """Return where the sequences [first, last), which are stored one after another, are among the tokens."""
        if first >= last:
            return slice(0, 0)
        size = self.dtype.itemsize
        end = int(self.pointers[last - 1]) // size + int(self.lengths[last - 1])
        return slice(int(self.pointers[first]) // size, end)

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Copy the tokens of the runs ``[start, stop)``, counted in tokens, into one 1-D array."""
        # Slicing a memoryview and joining bytes take half the time of numpy's slices and concatenation.
        tokens: Any = self.tokens.data if isinstance(self.tokens, np.ndarray) else self.tokens
        pieces = [tokens[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        return np.frombuffer(bytearray().join(pieces), self.dtype)

    @property
    def token_count(self) -> int:
        """Number of tokens in all sequences."""
        return bin_path(self.prefix).stat().st_size // self.dtype.itemsize

    @property
    def version(self) -> list[str | tuple[int, int]]:
        """Identifies this version of the set: the location, sizes and modification times of its files."""
        stats = [path(self.prefix).stat() for path in (idx_path, bin_path)]
        return [str(Path(self.prefix).resolve()), *[(s.st_size, s.st_mtime_ns) for s in stats]]

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be sent to loader processes as a copy of the whole file.
        return {"prefix": self.prefix, "access": self.access}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self.access = state["prefix"], state["access"]
        self._read_index()
        self.tokens = self._open_tokens()


_ANEW = "make the set again with rapidformer data preprocess, or copy both files again"


def _refuse(wrong: np.ndarray, first: int, message: str, what: str, path: Path) -> None:
    if wrong.any():
        raise DataError(f"{what} {first + int(wrong.argmax()):,} {message}", where=str(path), hint=_ANEW)


def check_vocabulary(dataset: IndexedDataset, size: int, largest: int | None = None) -> int:
    """Return the largest token of a set, after checking that all tokens are below ``size``.

    Args:
        dataset: the set. All of its tokens are read, at 2 to 4 GB per second.
        size: size of the model's vocabulary.
        largest: the largest token if it is known. Then nothing is read.

    Raises:
        DataError: a token is negative or outside of the vocabulary. The message names the first such sequence.
    """
    if largest is not None and 0 <= largest < size:
        return largest
    largest = -1
    for start in range(0, dataset.token_count, CHUNK):
        tokens = dataset.tokens[start : min(start + CHUNK, dataset.token_count)]
        wrong = (tokens < 0) | (tokens >= size)
        if wrong.any():
            first = start + int(wrong.argmax())
            sequence = int(np.searchsorted(dataset.pointers, first * dataset.dtype.itemsize, side="right")) - 1
            raise DataError(
                f"token {dataset.tokens[first : first + 1][0]} in sequence {sequence:,} is not in the vocabulary "
                f"of {size:,} tokens",
                where=str(bin_path(dataset.prefix)),
                hint="the set was made with another tokenizer: give the one that made it, or make the set again",
            )
        largest = max(largest, int(tokens.max()))
    return largest
