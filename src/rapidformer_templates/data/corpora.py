"""The corpora of ``--data-path``: indexed data sets, and raw text that becomes one on first use."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.config import RunConfig
from rapidformer_templates.data.files import BadLines, documents
from rapidformer_templates.data.index_cache import IndexCache, cache_root, identity, key_of, locked
from rapidformer_templates.data.indexed import IndexedDataset, check_vocabulary, is_indexed, type_for
from rapidformer_templates.data.indexed_writer import IndexedWriter, read_sums
from rapidformer_templates.data.reading import nearest
from rapidformer_templates.data.tokenizers import vocabulary_size
from rapidformer_templates.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".parquet")
CACHE_VERSION = 2
"""Part of a cache's name: raise it when the files in a cache change their meaning."""

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 4_000_000
"""How much text is tokenized at a time; it bounds the memory."""

NAME = "text_document"


@dataclass(frozen=True)
class Entry:
    """One corpus of ``--data-path``.

    Attributes:
        paths: the prefix of an indexed set, or the files, folders and globs of raw text.
        indexed: which of the two.
        weight: its weight in a blend, as it was written; None without weights.
    """

    paths: tuple[str, ...]
    indexed: bool
    weight: str | None = None


@dataclass(frozen=True)
class Corpus:
    """An open corpus.

    Attributes:
        dataset: its tokens.
        weight: see :class:`Entry`.
        skipped: ``file:line: reason`` of the lines that were left out when it was tokenized.
    """

    dataset: IndexedDataset
    weight: str | None = None
    skipped: tuple[str, ...] = ()


def parse_data_path(words: Sequence[str]) -> list[Entry]:
    """The corpora of ``--data-path``: ``A``, ``A B``, or with weights ``0.3 A 0.7 B``.

    Raw text without weights is one corpus, its files one after another; each indexed set is one.

    Raises:
        DataError: nothing is named, or weights and paths do not alternate.
    """
    if not words:
        raise DataError("no corpus is named", where="--data-path", hint="give files, a folder, a glob or a prefix")
    if _is_weight(words[0]) and len(words) > 1:
        pairs = list(zip(words[::2], words[1::2], strict=False))
        if len(words) % 2 or not all(_is_weight(weight) and not _is_weight(path) for weight, path in pairs):
            hint = "write a weight before each corpus: 0.3 A 0.7 B"
            raise DataError("weights and corpora do not alternate", where=f"--data-path {' '.join(words)}", hint=hint)
        return [Entry((path,), is_indexed(path), weight) for weight, path in pairs]
    raw = tuple(word for word in words if not is_indexed(word))
    entries = [Entry((word,), indexed=True) for word in words if is_indexed(word)]
    return [Entry(raw, indexed=False), *entries] if raw else entries


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return not Path(word).exists()


def check_corpora(words: Sequence[str]) -> None:
    """Look at what can be seen to be wrong with ``--data-path`` before anything is tokenized.

    Raises:
        DataError: see :func:`parse_data_path`, :func:`corpus_files` and :class:`IndexedDataset`.
    """
    for entry in parse_data_path(words):
        if entry.indexed:
            IndexedDataset(entry.paths[0])
        else:
            corpus_files(entry.paths)


def corpus_files(paths: Sequence[str]) -> list[Path]:
    """The files of raw text: files, folders (all files of a known kind below them) and globs, in order.

    Raises:
        DataError: a path is not there, or holds nothing.
    """
    files: list[Path] = []
    for path in paths:
        base = Path(path)
        if base.is_dir():
            found = sorted(base.rglob("*"))
        else:
            found = [base] if base.is_file() else sorted(map(Path, glob.glob(path, recursive=True)))
        readable = [file for file in found if file.is_file() and file.suffix.lower() in SUFFIXES]
        if not readable:
            raise _no_corpus(path, base, exists=base.is_dir() or bool(found))
        files += readable
    return list(dict.fromkeys(files))


def _no_corpus(path: str, base: Path, *, exists: bool) -> DataError:
    kinds = f"a corpus is a prefix of an indexed data set, or a file, a folder or a glob of {', '.join(SUFFIXES)}"
    if exists:
        return DataError(f"there is no text file in {path}", where="--data-path", hint=kinds)
    siblings = [str(p) for p in base.parent.iterdir()] if base.parent.is_dir() else []
    return DataError(f"{path} does not exist", where="--data-path", hint=nearest(path, siblings) + kinds)


def load_corpora(config: RunConfig, tokenizer: PreTrainedTokenizerFast, end_token_id: int) -> list[Corpus]:
    """The corpora of ``--data-path``, open. Raw text is tokenized on first use.

    Several processes may call this at once: the first tokenizes, the others wait for it.

    Raises:
        DataError: a file that cannot be read, a corpus without a document, a damaged indexed set, or
            one with tokens beyond the vocabulary.
    """
    corpora = []
    for entry in parse_data_path(config.data.data_path or ()):
        if entry.indexed:
            dataset = IndexedDataset(entry.paths[0], config.data.data_impl)
            _check_tokens(dataset, vocabulary_size(tokenizer), IndexCache(cache_root(config)))
            corpora.append(Corpus(dataset, entry.weight))
        else:
            folder = _tokenized(entry.paths, config, tokenizer, end_token_id)
            skipped = json.loads((folder / "skipped.json").read_text(encoding="utf-8"))
            corpora.append(Corpus(_open(folder, config), entry.weight, tuple(skipped)))
    return corpora


def _check_tokens(dataset: IndexedDataset, vocabulary: int, cache: IndexCache) -> None:
    """Refuse tokens beyond the vocabulary; a set without a file of checksums is read once to see."""
    sums = read_sums(dataset.prefix)
    if sums is not None:
        check_vocabulary(dataset, vocabulary, int(sums["largest_token"]))
        return
    name = "largest-" + key_of(identity(dataset.prefix))
    known = cache(name, lambda: {"largest": np.array([check_vocabulary(dataset, vocabulary)])})
    check_vocabulary(dataset, vocabulary, int(known["largest"][0]))


def _open(folder: Path, config: RunConfig) -> IndexedDataset:
    try:
        return IndexedDataset(folder / NAME, config.data.data_impl)
    except DataError as error:
        hint = "delete this folder; it is made anew"
        message = f"the cache of the tokenized corpus is damaged: {error.message}"
        raise DataError(message, where=str(folder), hint=hint) from error


def _tokenized(paths: Sequence[str], config: RunConfig, tokenizer: PreTrainedTokenizerFast, end_token_id: int) -> Path:
    """The cache folder of raw text."""
    files = corpus_files(paths)
    column = config.data.text_column or "text"
    bad = BadLines(skip=config.data.skip_bad_lines)
    root = cache_root(config)
    folder = root / _cache_key(files, tokenizer, [end_token_id, column, bad.skip])
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{folder.name}.lock"):
            if not folder.is_dir():
                _write_corpus(files, column, bad, tokenizer, end_token_id, folder)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        hint = "free some space, or choose another folder with --data-cache-dir"
        message = "the disk is full" if full else f"the corpus cannot be tokenized: {error}"
        raise DataError(message, where=str(root), hint=hint if full else "check the folder and its rights") from error
    return folder


def _cache_key(files: Sequence[Path], tokenizer: PreTrainedTokenizerFast, options: list[Any]) -> str:
    """A name that changes when a file, the tokenizer or an option does."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    # Truncation and padding are state of the last call on the tokenizer, not part of what it is.
    model = {
        k: v for k, v in json.loads(tokenizer.backend_tokenizer.to_str()).items() if k not in ("truncation", "padding")
    }
    return "text-" + key_of([CACHE_VERSION, stats, model, options])


def _write_corpus(
    files: Sequence[Path],
    column: str,
    bad: BadLines,
    tokenizer: PreTrainedTokenizerFast,
    end_token_id: int,
    folder: Path,
) -> None:
    """Tokenize into a temporary folder, and rename it when it is whole."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left behind by a process that was killed
    temporary.mkdir()
    try:
        with IndexedWriter(temporary / NAME, type_for(vocabulary_size(tokenizer))) as writer:
            for rows in _tokenized_batches(files, column, bad, tokenizer):
                ended = [np.asarray([*row, end_token_id]) for row in rows]
                writer.add(np.concatenate(ended), np.array([len(row) for row in ended]))
            if not len(writer.lengths):
                note = f" ({len(bad.skipped)} lines were left out)" if bad.skipped else ""
                raise DataError(
                    f"the corpus is empty{note}", where=str(files[0]), hint="it needs at least one document"
                )
        (temporary / "skipped.json").write_text(json.dumps(bad.skipped), encoding="utf-8")
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _tokenized_batches(
    files: Sequence[Path], column: str, bad: BadLines, tokenizer: PreTrainedTokenizerFast
) -> Iterator[list[list[int]]]:
    # One bar for the user at a terminal, not one for each worker or in each log file.
    silent = not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0"
    with Progress(disable=silent) as progress:
        bar = progress.add_task("tokenizing", total=sum(f.stat().st_size for f in files))
        for path in files:
            for texts in _batches(documents(path, column, bad)):
                yield tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                    "input_ids"
                ]
                progress.advance(bar, sum(map(len, texts)))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def split_shares(split: str) -> list[float]:
    """The three shares of ``--split``; those that are not given are 0.

    Raises:
        DataError: the text is not up to three shares, or they sum to nothing.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        hint = "write three shares, such as 969,30,1"
        raise DataError(f"'{split}' are not shares of a corpus", where="--split", hint=hint)
    return shares + [0.0] * (3 - len(shares))


def split_sequences(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """The sequences [first, last) of each part; each is in one part.

    Shares are cumulated and rounded as Megatron-LM's core does.
    """
    parts = (np.asarray(shares) / np.sum(shares)).tolist()
    sums: list[float] = reduce(lambda done, part: [*done, done[-1] + part], parts, [0.0])
    return list(pairwise(round(share * count) for share in sums))
