"""Raw corpora for pretraining: tokenized once into a cache, read as fixed windows.

A corpus is one long stream of tokens, memory-mapped: its documents in the order of their files, an
end token after each. ``--split`` shares out whole documents in that order, as Megatron-LM does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.config import RunConfig
from rapidformer_templates.data.files import TEXT_SUFFIXES, BadLines, documents, text_files
from rapidformer_templates.data.tokenizers import vocabulary_size
from rapidformer_templates.errors import DataError

CACHE_VERSION = 1
"""Part of a cache's name: raise it when the files in a cache change their meaning."""

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 4_000_000
"""How much text is tokenized at a time; it bounds the memory."""


def corpus_files(paths: Sequence[str]) -> list[Path]:
    """The files of ``--data-path``; see :func:`~rapidformer_templates.data.files.text_files`.

    Raises:
        DataError: a path is not there, holds nothing, or is of a form that is not in this version.
    """
    for path in paths:
        _refuse_later_forms(path, paths)
    return text_files(paths, "--data-path")


def _refuse_later_forms(path: str, paths: Sequence[str]) -> None:
    base = Path(path)
    if _is_number(path) and not base.exists() and len(paths) > 1:
        hint = "give the files without weights; they are read one after another"
        raise DataError("a weighted blend of corpora is not in this version", where=f"--data-path {path}", hint=hint)
    indexed = base.suffix in (".bin", ".idx") or any(Path(path + end).is_file() for end in (".bin", ".idx"))
    if indexed and not base.is_dir():
        hint = f"give the raw text that it was made from: {', '.join(TEXT_SUFFIXES)}"
        raise DataError("Megatron's indexed format is not in this version", where=f"--data-path {path}", hint=hint)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def cache_root(config: RunConfig) -> Path:
    """``--data-cache-dir``, else ``rapidformer_templates`` in the user's cache folder (the XDG standard)."""
    if config.data.data_cache_dir:
        return Path(config.data.data_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rapidformer_templates"


class Corpus:
    """A tokenized corpus in a cache folder.

    Attributes:
        ends: where each document ends in the stream, with 0 before the first; shape (documents + 1,).
        skipped: ``file:line: reason`` of the lines that were left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        self.dtype = np.dtype(facts["dtype"])
        self.skipped: list[str] = facts["skipped"]
        self.ends = np.load(folder / "ends.npy", mmap_mode="r")
        size = (folder / "tokens.bin").stat().st_size
        if len(self.ends) != facts["documents"] + 1 or size != facts["tokens"] * self.dtype.itemsize:
            raise DataError(
                "the cache of the tokenized corpus is damaged",
                where=str(folder),
                hint="delete this folder; it is made anew",
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        """The stream, memory-mapped."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would travel to a loader process as a copy of the whole file.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def load_corpus(config: RunConfig, tokenizer: PreTrainedTokenizerFast, end_token_id: int) -> Corpus:
    """The tokenized corpus of ``--data-path``, made on first use.

    Several processes may call this at once: the first makes it, the others wait for it.

    Raises:
        DataError: a file that cannot be read, or a corpus without a document.
    """
    if not config.data.data_path:
        raise DataError("no corpus is named", where="--data-path", hint="give files, a folder or a glob of raw text")
    files = corpus_files(config.data.data_path)
    column = config.data.text_column or "text"
    bad = BadLines(skip=config.data.skip_bad_lines)
    root = cache_root(config)
    folder = root / _cache_key(files, tokenizer, [end_token_id, column, bad.skip])
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f"{folder.name}.lock"):
                if not folder.is_dir():
                    _write_corpus(files, column, bad, tokenizer, end_token_id, folder)
        except OSError as error:
            full = error.errno == errno.ENOSPC
            hint = "free some space, or choose another folder with --data-cache-dir"
            message = "the disk is full" if full else f"the corpus cannot be tokenized: {error}"
            raise DataError(
                message, where=str(root), hint=hint if full else "check the folder and its rights"
            ) from error
    return Corpus(folder)


def _cache_key(files: Sequence[Path], tokenizer: PreTrainedTokenizerFast, options: list[Any]) -> str:
    """A name that changes when a file, the tokenizer or an option does."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    # Truncation and padding are state of the last call on the tokenizer, not part of what it is.
    model = {
        k: v for k, v in json.loads(tokenizer.backend_tokenizer.to_str()).items() if k not in ("truncation", "padding")
    }
    text = json.dumps([CACHE_VERSION, stats, model, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes; the lock goes with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
        dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32)
        ends = [0]
        with (temporary / "tokens.bin").open("wb") as out:
            for rows in _tokenized_batches(files, column, bad, tokenizer):
                for row in rows:
                    out.write(np.asarray([*row, end_token_id], dtype=dtype).tobytes())
                    ends.append(ends[-1] + len(row) + 1)
        if len(ends) == 1:
            note = f" ({len(bad.skipped)} lines were left out)" if bad.skipped else ""
            raise DataError(f"the corpus is empty{note}", where=str(files[0]), hint="it needs at least one document")
        np.save(temporary / "ends.npy", np.asarray(ends, dtype=np.int64))
        facts = {"dtype": dtype.name, "documents": len(ends) - 1, "tokens": ends[-1], "skipped": bad.skipped}
        (temporary / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")
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


def split_documents(shares: Sequence[float], documents: int) -> list[tuple[int, int]]:
    """The documents [first, last) of each part.

    Shares are cumulated and rounded as Megatron-LM does, so that each document is in one part.
    """
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * documents))
    excess = bounds[-1] - documents
    return list(pairwise([0] + [min(max(bound - excess, 0), documents) for bound in bounds[1:]]))


class Windows(Sequence[dict[str, np.ndarray]]):
    """Consecutive windows of a part of the stream; what is left at its end is not used.

    Args:
        corpus: where the tokens are.
        part: first and last document, [first, last).
        length: tokens of the stream in a window.
        before, after: tokens that are put around each window, such as ``[CLS]`` and ``[SEP]``.
    """

    def __init__(
        self, corpus: Corpus, part: tuple[int, int], length: int, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> None:
        self.corpus = corpus
        self.start = int(corpus.ends[part[0]])
        self.length = length
        self.before, self.after = np.asarray(before, np.int64), np.asarray(after, np.int64)
        self.samples = (int(corpus.ends[part[1]]) - self.start) // length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        index = range(self.samples)[index]
        start = self.start + index * self.length
        window = self.corpus.tokens[start : start + self.length]
        if len(self.before) or len(self.after):
            return {"input_ids": np.concatenate([self.before, window, self.after])}
        return {"input_ids": window}

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample."""
        return np.full(self.samples, self.length + len(self.before) + len(self.after))
