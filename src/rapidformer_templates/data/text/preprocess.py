"""Converts raw text to Megatron's indexed data sets, with all cores and constant memory.

This process splits the files into parts of whole lines and sends out their names and positions. Worker processes read,
parse and tokenize them. The results are written in the order of the text. So the bytes do not depend on the number of
workers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from rapidformer_templates.data.indexed.writer import IndexedWriter, disk_errors
from rapidformer_templates.data.text import fast_tokenizers
from rapidformer_templates.data.text.encoding import Encoded, Encoder, EncodingJob, EncodingRecipe, start_worker, work
from rapidformer_templates.data.text.fast_tokenizers import EncodingMethod, NotEquivalent
from rapidformer_templates.data.text.files import (
    Row,
    Span,
    TextUnit,
    data_suffix,
    parquet_row_count,
    parquet_rows,
    utf8_lines,
)
from rapidformer_templates.errors import DataError, WorkerFailed
from rapidformer_templates.system.terminal import ProgressBar

JOB_BYTES = 1 << 20
"""A part of a file ends with the line that reaches this size."""

AHEAD = 8
"""Maximum number of jobs in progress per worker. With the size of a job it limits the memory."""

CHECKED = 64
"""The first of every 64 jobs is tokenized by both the fast tokenizer and the reference."""

LISTED = 5
"""Number of bad lines that are shown. The file next to the data sets lists all of them."""

Backend = Literal["auto", "gigatoken", "transformers"]


@dataclass
class PreprocessResult:
    """The result of preprocessing a corpus.

    Attributes:
        prefix: prefix of the data set, by key.
        documents, tokens, empty: how many were written, and how many were left out as empty, by key.
        dtype: dtype of the tokens.
        skipped: number of bad lines that were left out.
        examples: the first of them.
        skipped_file: the file that lists all of them. None if there are none.
        way: how the tokenizer was run.
        compared: number of tokens that were compared with the reference.
        notes: lines for the user.
        seconds: duration in seconds.
    """

    dtype: str
    way: EncodingMethod
    prefix: dict[str, str] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    skipped_file: Path | None = None
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def preprocess(
    files: Sequence[Path],
    prefix: str,
    recipe: EncodingRecipe,
    *,
    workers: int,
    chunk_size: int = 1000,
    backend: Backend = "auto",
    check_all: bool = False,
    overwrite: bool = False,
) -> PreprocessResult:
    """Tokenize files of raw text into ``PREFIX_KEY_document`` (or ``_sentence``), one data set per key.

    Args:
        files: ``.jsonl``, ``.txt`` or ``.parquet``, in order.
        prefix: prefix of the data sets.
        recipe: how to process the text. This function sets its ``way``.
        workers: number of tokenizing processes. With 0 this process tokenizes.
        chunk_size: maximum number of lines (``.txt``: documents) per job.
        backend: ``gigatoken`` or ``transformers``. ``auto`` is the first if it is installed. A tokenizer that is not
            proven equal is not used.
        check_all: compare the fast tokenizer with the reference on the whole corpus instead of a part.
        overwrite: replace existing data sets.

    Raises:
        DataError: a line cannot be used, a data set exists, the disk is full, or there is no document at all.
        WorkerFailed: a worker was killed.
    """
    began = time.perf_counter()
    # Try the tokenizers, fastest first.
    installed = fast_tokenizers.is_installed()
    if backend == "gigatoken" and not installed:
        hint = "pip install 'rapidformer_templates[fast-bpe]'"
        raise DataError("gigatoken is not installed", where="--tokenizer-backend gigatoken", hint=hint)
    ways: tuple[EncodingMethod, ...] = ("pieces", "whole")
    if installed and backend != "transformers":
        ways = ("gigatoken", *ways)
    notes: list[str] = []
    for way in ways:
        try:
            result = _preprocess(
                files, prefix, replace(recipe, way=way), workers, chunk_size, check_all=check_all, overwrite=overwrite
            )
        except NotEquivalent as difference:
            notes.append(f"{TITLES[way]} is not used: {difference}")
        else:
            result.notes = notes
            result.seconds = time.perf_counter() - began
            return result
    raise AssertionError("the reference differs from itself")


TITLES: dict[EncodingMethod, str] = {
    "gigatoken": "gigatoken",
    "pieces": "transformers' tokenizer with a memory of pieces",
    "whole": "transformers' tokenizer",
}


def _preprocess(
    files: Sequence[Path],
    prefix: str,
    recipe: EncodingRecipe,
    workers: int,
    chunk_size: int,
    *,
    check_all: bool,
    overwrite: bool,
) -> PreprocessResult:
    """Make one pass over the corpus with one tokenizer. For the arguments see :func:`preprocess`."""
    level = "sentence" if recipe.sentences else "document"
    result = PreprocessResult(recipe.dtype, recipe.way, {key: f"{prefix}_{key}_{level}" for key in recipe.keys})
    result.empty = dict.fromkeys(recipe.keys, 0)
    size, began = sum(file.stat().st_size for file in files), time.perf_counter()

    def speed() -> str:
        seconds = time.perf_counter() - began
        tokens, documents = sum(writer.tokens for writer in writers), sum(writer.documents for writer in writers)
        return f"{tokens / seconds:,.0f} tokens/s  {documents / seconds:,.0f} documents/s"

    with ExitStack() as stack:
        options: dict[str, Any] = {"overwrite": overwrite, "vocabulary": recipe.vocabulary}
        opened = (IndexedWriter(name, np.dtype(recipe.dtype), **options) for name in result.prefix.values())
        writers = [stack.enter_context(writer) for writer in opened]
        skipped = stack.enter_context(_SkippedFile(prefix))
        progress = stack.enter_context(ProgressBar("preprocessing", size, show_count=False))
        jobs = split_files(files, recipe.keys, chunk_size, unit=recipe.text_unit, check_all=check_all)
        for job, block in encoded(jobs, recipe, workers):
            for writer, key, column in zip(writers, recipe.keys, block.columns, strict=True):
                writer.add(column.tokens, column.lengths, column.sequences)
                result.empty[key] += column.empty
            skipped.add(block.skipped)
            result.compared += block.compared
            progress.advance(job.bytes, speed)
        for key, writer in zip(recipe.keys, writers, strict=True):
            if not writer.documents:
                hint = f"check the files; empty: {result.empty[key]}, bad lines: {skipped.count}"
                message = f"there is no document with text for the key '{key}'"
                raise DataError(message, where=result.prefix[key], hint=hint)
        for key, writer in zip(recipe.keys, writers, strict=True):
            writer.seal()
            result.documents[key], result.tokens[key] = writer.documents, writer.tokens
    result.skipped, result.examples = skipped.count, skipped.examples
    result.skipped_file = skipped.path if skipped.count else None
    return result


def split_files(
    files: Sequence[Path],
    keys: Sequence[str],
    chunk_size: int,
    *,
    unit: TextUnit = "paragraph",
    check_all: bool = False,
) -> Generator[EncodingJob]:
    """Yield the jobs of a corpus in order. For the arguments see :func:`preprocess`."""
    number = 0
    for path in files:
        pieces: Iterator[tuple[Span | list[tuple[int, Row]], int]]
        if data_suffix(path) == ".parquet":
            pieces = _row_parts(path, keys, chunk_size)
        else:
            pieces = _spans(path, chunk_size, unit if data_suffix(path) == ".txt" else "line")
        for part, size in pieces:
            yield EncodingJob(path, part, size, check_all or number % CHECKED == 0)
            number += 1


def _spans(path: Path, chunk_size: int, unit: TextUnit) -> Iterator[tuple[Span, int]]:
    """Yield parts of whole documents: lines, paragraphs with the blank line after them, or the whole file."""
    with utf8_lines(path) as (file, has_bytes_of_file):
        start = position = documents = 0
        first, lines = 1, []
        for number, line in enumerate(file, start=1):
            position += len(line)
            if not has_bytes_of_file:
                lines.append(line)
            if unit == "file" or (unit == "paragraph" and line.strip()):
                continue
            documents += 1
            if documents >= chunk_size or position - start >= JOB_BYTES:
                yield Span(start, position, first, None if has_bytes_of_file else b"".join(lines)), position - start
                start, first, documents, lines = position, number + 1, 0, []
    if position > start:
        yield Span(start, position, first, None if has_bytes_of_file else b"".join(lines)), position - start


def _row_parts(path: Path, keys: Sequence[str], chunk_size: int) -> Iterator[tuple[list[tuple[int, Row]], int]]:
    """Yield parts of a Parquet file. Each row counts an equal share of the file's bytes."""
    row_bytes = path.stat().st_size / max(parquet_row_count(path), 1)
    rows: list[tuple[int, Row]] = []
    size = 0
    for number, row in parquet_rows(path, list(keys)):
        rows.append((number, row))
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(rows) >= chunk_size or size >= JOB_BYTES:
            yield rows, round(len(rows) * row_bytes)
            rows, size = [], 0
    if rows:
        yield rows, round(len(rows) * row_bytes)


def encoded(
    jobs: Generator[EncodingJob], recipe: EncodingRecipe, workers: int
) -> Iterator[tuple[EncodingJob, Encoded]]:
    """Yield each job with its result, in order. The number of jobs in progress is limited.

    Worker processes also end if this process ends in any way.

    Raises:
        WorkerFailed: a worker exited too early.
    """
    if not workers:
        encoder = Encoder(recipe)
        yield from ((job, encoder(job)) for job in jobs)
        return
    # Start fresh processes. A fork would copy the locks of this process's threads, and its end of the pipe.
    context = multiprocessing.get_context("spawn")
    alive, own_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, start_worker, (recipe, alive))
    pending: deque[tuple[EncodingJob, Future[Encoded]]] = deque()
    try:
        for job in jobs:
            pending.append((job, pool.submit(work, job)))
            if len(pending) >= AHEAD * workers:
                job, future = pending.popleft()
                yield job, future.result()
        while pending:
            job, future = pending.popleft()
            yield job, future.result()
    except BrokenProcessPool as error:
        hint = "usually memory ran out: use fewer --workers or a smaller --chunk-size, and run it again"
        message = "a worker process was killed; nothing was written"
        raise WorkerFailed(message, where="data preprocess", hint=hint) from error
    finally:
        jobs.close()
        own_end.close()
        pool.shutdown(cancel_futures=True)
        alive.close()


class _SkippedFile:
    """``PREFIX.skipped.txt``: every line that was left out, with the reason. It is only made if there is one."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(f"{prefix}.skipped.txt")
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        self.count = 0
        self.examples: list[str] = []
        self._file: IO[str] | None = None

    def __enter__(self) -> _SkippedFile:
        return self

    def add(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        with disk_errors(self.path):
            if self._file is None:
                self._file = self.temporary.open("w", encoding="utf-8")
            self._file.writelines(f"{line}\n" for line in lines)
        self.count += len(lines)
        self.examples += lines[: LISTED - len(self.examples)]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with disk_errors(self.path):
            try:
                if self._file:
                    self._file.close()
                if kind is None:
                    self.path.unlink(missing_ok=True)
                    if self._file:
                        self.temporary.rename(self.path)
            finally:
                self.temporary.unlink(missing_ok=True)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
