"""Writes Megatron's indexed data sets. Data are streamed, and a set is either complete or absent.

``PREFIX.sums.json`` accompanies the two files of Megatron's format. It makes flipped bits detectable, and records the
largest token, so that the tokens need not be read to find it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np

from rapidformer_templates.data.indexed.dataset import CHUNK, HEADER, MAGIC, TYPES, VERSION, bin_path, idx_path
from rapidformer_templates.data.text.files import prefix_of
from rapidformer_templates.errors import DataError
from rapidformer_templates.system.files import JSON_ERRORS, crc32, sync, to_json, write_at, write_json, write_synced

BLOCK = 1 << 22
"""Bytes of ``.bin`` that one checksum covers."""


class Sums(TypedDict):
    """The contents of ``PREFIX.sums.json``.

    ``bin`` has the ``bytes`` of that file, and the ``crc32`` of each block of ``block_bytes``. ``idx`` has a ``crc32``.
    """

    bin: dict[str, Any]
    idx: dict[str, int]
    largest_token: int
    vocabulary: str | None


def sums_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.sums.json")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert errors of the disk inside the context to a readable :class:`DataError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message, hint = "the disk is full", "free some space, or write to another disk, and run it again"
        else:
            message, hint = f"cannot write: {error.strerror}", "check the folder, its rights and limits"
        raise DataError(message, where=str(path), hint=f"{hint}; nothing was left behind") from error


class IndexedWriter:
    """Writes one set. Use it as a context manager: without an error, the files get their final names at the end.

    The memory is constant, because the tables of the index are kept in unnamed temporary files.

    Args:
        prefix: the path without ``.bin`` or ``.idx``.
        dtype: dtype of the tokens. See :func:`~rapidformer_templates.data.indexed.dataset.type_for`.
        overwrite: replace an existing set.
        vocabulary: id of the vocabulary. See :func:`~rapidformer_templates.models.model_files.vocabulary_id`.

    Attributes:
        sequences, documents, tokens: numbers of those that were added.
        largest: the largest token, -1 before the first.

    Raises:
        DataError: the set exists, another process is writing it, or it cannot be written.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, *, overwrite: bool = False, vocabulary: str | None = None
    ) -> None:
        self.prefix = prefix_of(prefix)
        self.vocabulary = vocabulary
        self.dtype = np.dtype(dtype)
        # Tokens and checksums without an index are left from a killed writer, and do not count as a set.
        is_left = sums_path(self.prefix).exists()
        files = [idx_path(self.prefix)] if is_left else [idx_path(self.prefix), bin_path(self.prefix)]
        existing = next((path for path in files if path.exists()), None)
        if existing and not overwrite:
            raise DataError(f"{existing} exists", where=self.prefix, hint="choose another prefix, or add --overwrite")
        self.sequences = self.documents = 0
        self.largest = -1
        self._sums = BlockSums()
        self._sealed = False

    @property
    def tokens(self) -> int:
        return self._sums.bytes // self.dtype.itemsize

    def __enter__(self) -> Self:
        path = bin_path(self.prefix)
        if path.parent.is_file():
            raise DataError(f"{path.parent} is a file, not a folder", where=self.prefix, hint="choose another prefix")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Only this process writes to the file. The lock is released when the process ends.
            self._descriptor = os.open(_temporary(path), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._descriptor, 0)
                self._lengths, self._ends = (tempfile.TemporaryFile(dir=path.parent) for _ in range(2))  # noqa: SIM115
            except OSError as error:
                os.close(self._descriptor)
                if not isinstance(error, BlockingIOError):
                    raise
                where, hint = str(_temporary(path)), "wait for it, or choose another prefix"
                raise DataError("another process is writing this set", where=where, hint=hint) from None
        return self

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None) -> None:
        """Add documents.

        Args:
            tokens: all their tokens, one after another. All must fit the dtype.
            lengths: tokens of each sequence, never 0. Shape (sequences,).
            sequences: number of sequences in each document. None means one each.

        Raises:
            DataError: the disk is full, or cannot be written to.
        """
        if not len(tokens):
            return
        assert int(lengths.min()) > 0
        assert int(lengths.sum()) == len(tokens)
        self.largest = max(self.largest, int(tokens.max()))
        data = np.ascontiguousarray(tokens, dtype=self.dtype).data.cast("B")
        counts = np.ones(len(lengths), np.int64) if sequences is None else np.asarray(sequences, np.int64)
        with disk_errors(bin_path(self.prefix)):
            write_at(self._descriptor, data, self._sums.bytes)
            self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").data)
            self._ends.write((self.sequences + np.cumsum(counts)).astype("<i8").data)
        self._sums.add(data)
        self.sequences += len(lengths)
        self.documents += len(counts)

    def seal(self) -> None:
        """Write all remaining data, still under the temporary names.

        If several sets belong together, seal all of them before the first is renamed.
        """
        names = [_temporary(path(self.prefix)) for path in (idx_path, sums_path)]
        with disk_errors(bin_path(self.prefix)):
            os.fsync(self._descriptor)
            self._write_index(names[0])
            write_synced(names[1], to_json(_facts(self._sums, names[0], self.largest, self.vocabulary)))
        self._sealed = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The index is renamed last, because a set without an index does not count as existing.
        finals = [path(self.prefix) for path in (sums_path, bin_path, idx_path)]
        try:
            if kind is None:
                if not self._sealed:
                    self.seal()
                with disk_errors(finals[1]):
                    finals[2].unlink(missing_ok=True)
                    for path in finals:
                        _temporary(path).rename(path)
                    sync(finals[1].parent)
        finally:
            for path in finals:
                _temporary(path).unlink(missing_ok=True)
            self._lengths.close()
            self._ends.close()
            os.close(self._descriptor)

    def _write_index(self, path: Path) -> None:
        with path.open("wb") as file:
            code = next(code for code, kind in TYPES.items() if kind == self.dtype)
            file.write(HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, file)
            self._lengths.seek(0)
            end = 0
            while part := self._lengths.read(4 * CHUNK):
                ends = end + np.cumsum(np.frombuffer(part, "<i4"), dtype=np.int64) * self.dtype.itemsize
                file.write(np.concatenate([[end], ends[:-1]]).astype("<i8").data)
                end = int(ends[-1])
            file.write(np.zeros(1, "<i8").data)
            self._ends.seek(0)
            shutil.copyfileobj(self._ends, file)
            file.flush()
            os.fsync(file.fileno())


class BlockSums:
    """CRC-32 of each block of a stream."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.bytes = 0
        self._blocks: list[int] = []
        self._crc = 0

    def add(self, data: memoryview) -> None:
        while data:
            room = self.block - self.bytes % self.block
            part, data = data[:room], data[room:]
            self._crc = zlib.crc32(part, self._crc)
            self.bytes += len(part)
            if self.bytes % self.block == 0:
                self._blocks.append(self._crc)
                self._crc = 0

    def checksums(self) -> list[int]:
        return self._blocks + ([self._crc] if self.bytes % self.block else [])


def sums_of(path: Path, block: int = BLOCK) -> BlockSums:
    """Return the checksums of a file. ``block`` is the block size in bytes."""
    sums = BlockSums(block)
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            sums.add(memoryview(part))
    return sums


def _facts(sums: BlockSums, index: Path, largest: int, vocabulary: str | None = None) -> Sums:
    return {
        "bin": {"bytes": sums.bytes, "block_bytes": BLOCK, "crc32": sums.checksums()},
        "idx": {"crc32": crc32(index)},
        "largest_token": largest,
        "vocabulary": vocabulary,
    }


def write_sums(prefix: str | Path, largest: int) -> None:
    """Write the checksums of a set from another program. ``largest`` is its largest token."""
    with disk_errors(sums_path(prefix)):
        write_json(sums_path(prefix), _facts(sums_of(bin_path(prefix)), idx_path(prefix), largest))


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def read_sums(prefix: str | Path) -> Sums | None:
    """Return the contents of ``PREFIX.sums.json``, or None without that file (a set from another program).

    Raises:
        DataError: it cannot be read.
    """
    path = sums_path(prefix_of(prefix))
    if not path.is_file():
        return None
    try:
        sums: Sums = json.loads(path.read_text(encoding="utf-8"))
        blocks = -(-sums["bin"]["bytes"] // sums["bin"]["block_bytes"])
        numbers = [*sums["bin"]["crc32"], sums["idx"]["crc32"], sums["largest_token"]]
        is_whole = len(sums["bin"]["crc32"]) == blocks and all(isinstance(number, int) for number in numbers)
    except (*JSON_ERRORS, ArithmeticError):
        is_whole = False
    if not is_whole:
        hint = "delete it, and create it again with rapidformer data verify --write-sums if you trust the set"
        raise DataError("the file of checksums is damaged", where=str(path), hint=hint)
    return sums
