"""Writing Megatron's indexed data sets: streamed, and either whole or not there.

Beside the two files of Megatron's format stands ``PREFIX.sums.json``: by it a flipped bit is found, and
the largest token is known without reading them all.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from pathlib import Path
from typing import Any, Self

import numpy as np

from rapidformer_templates.data.indexed import CHUNK, HEADER, MAGIC, TYPES, VERSION, bin_path, idx_path, prefix_of
from rapidformer_templates.errors import DataError
from rapidformer_templates.files import crc32, sync, to_json, write_synced

BLOCK = 1 << 26
"""Bytes of ``.bin`` that one checksum covers."""


def sums_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.sums.json")


class IndexedWriter:
    """Writes one set. Use it as a context: what is left without an error is renamed to its final names.

    Args:
        prefix: the path without ``.bin`` or ``.idx``.
        dtype: type of the tokens; see :func:`~rapidformer_templates.data.indexed.type_for`.
        overwrite: replace a set that is there.

    Raises:
        DataError: a set is there already, or the folder cannot be written to.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], *, overwrite: bool = False) -> None:
        self.prefix = prefix_of(prefix)
        self.dtype = np.dtype(dtype)
        self.codes = {known: code for code, known in TYPES.items()}
        if self.dtype not in self.codes:
            raise DataError(f"the format has no tokens of type {self.dtype}", where=self.prefix, hint="use int32")
        there = [path for path in (bin_path(self.prefix), idx_path(self.prefix)) if path.exists()]
        if there and not overwrite:
            raise DataError(f"{there[0]} exists", where=self.prefix, hint="choose another prefix, or add --overwrite")
        self.lengths = array("i")
        self.documents = array("q", [0])
        self.largest = -1
        self._sums = _BlockSums()

    def __enter__(self) -> Self:
        path = bin_path(self.prefix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _temporary(path).open("wb")
        except OSError as error:
            raise DataError(f"cannot write: {error.strerror}", where=str(path), hint="check the folder") from error
        return self

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None) -> None:
        """Add documents.

        Args:
            tokens: all their tokens, one after another; every one must fit the type.
            lengths: tokens of each sequence, none of them 0; shape (sequences,).
            sequences: sequences of each document; None means one each.
        """
        if not len(tokens):
            return
        assert int(lengths.min()) > 0
        assert int(lengths.sum()) == len(tokens)
        self.largest = max(self.largest, int(tokens.max()))
        data = np.ascontiguousarray(tokens, dtype=self.dtype).data.cast("B")
        self._file.write(data)
        self._sums.add(data)
        self.lengths.frombytes(np.ascontiguousarray(lengths, dtype="<i4").tobytes())
        counts = np.ones(len(lengths), np.int64) if sequences is None else np.asarray(sequences, np.int64)
        self.documents.frombytes((self.documents[-1] + np.cumsum(counts)).astype("<i8").tobytes())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        finals = bin_path(self.prefix), idx_path(self.prefix), sums_path(self.prefix)
        try:
            with self._file:
                if kind is not None:
                    return
                self._file.flush()
                os.fsync(self._file.fileno())
            self._write_index(_temporary(finals[1]))
            write_synced(_temporary(finals[2]), to_json(self._facts()))
            for path in finals:
                _temporary(path).rename(path)
            sync(finals[0].parent)
        finally:
            for path in finals:
                _temporary(path).unlink(missing_ok=True)

    def _write_index(self, path: Path) -> None:
        lengths = np.frombuffer(self.lengths, dtype="<i4")
        with path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self.codes[self.dtype], len(lengths), len(self.documents)))
            file.write(lengths.tobytes())
            end = 0
            for first in range(0, len(lengths), CHUNK):
                ends = end + np.cumsum(lengths[first : first + CHUNK], dtype=np.int64) * self.dtype.itemsize
                file.write(np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
                end = int(ends[-1])
            file.write(np.frombuffer(self.documents, dtype="<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _facts(self) -> dict[str, Any]:
        blocks = self._sums.done()
        return {
            "bin": {"bytes": self._sums.bytes, "block_bytes": BLOCK, "crc32": blocks},
            "idx": {"crc32": crc32(_temporary(idx_path(self.prefix)))},
            "largest_token": self.largest,
        }


class _BlockSums:
    """CRC-32 of each :data:`BLOCK` bytes of a stream."""

    def __init__(self) -> None:
        self.bytes = 0
        self._blocks: list[int] = []
        self._crc = 0

    def add(self, data: memoryview) -> None:
        while data:
            room = BLOCK - self.bytes % BLOCK
            part, data = data[:room], data[room:]
            self._crc = zlib.crc32(part, self._crc)
            self.bytes += len(part)
            if self.bytes % BLOCK == 0:
                self._blocks.append(self._crc)
                self._crc = 0

    def done(self) -> list[int]:
        return self._blocks + ([self._crc] if self.bytes % BLOCK else [])


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def read_sums(prefix: str | Path) -> dict[str, Any] | None:
    """What ``PREFIX.sums.json`` holds; None where there is none (a set that another program wrote).

    Raises:
        DataError: it cannot be read.
    """
    path = sums_path(prefix_of(prefix))
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not {"bin", "idx", "largest_token"} <= facts.keys():
        hint = "delete it, or make the set anew"
        raise DataError("the file of checksums is damaged", where=str(path), hint=hint)
    return facts
