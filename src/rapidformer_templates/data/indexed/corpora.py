"""Corpora of ``--data-path``: indexed data sets, and raw text that is tokenized once into a cache."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.indexed.dataset import IndexedDataset, bin_path, check_vocabulary, is_indexed, type_for
from rapidformer_templates.data.indexed.writer import read_sums
from rapidformer_templates.data.text.encoding import EncodingRecipe
from rapidformer_templates.data.text.files import data_suffix, no_corpus_error, text_files
from rapidformer_templates.data.text.preprocess import preprocess
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import vocabulary_id, vocabulary_size
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_values import weighted
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.system.files import hash_of, new_folder, user_cache

Tables = dict[str, np.ndarray]


def cache_root(config: RunConfig) -> Path:
    """Return ``--data-cache-dir``, else ``rapidformer_templates`` in the user's cache folder (XDG standard)."""
    return Path(config.data.data_cache_dir) if config.data.data_cache_dir else user_cache()


def contents(dataset: IndexedDataset) -> str:
    """Return a short text that differs for sets with different tokens. Empty if the set has no checksums."""
    sums = read_sums(dataset.prefix)
    return f" ({hash_of(sums['bin']['crc32'])[:12]})" if sums else ""


@dataclass(frozen=True)
class IndexCache:
    """Groups of tables in a folder. If several processes ask at once, the first builds them and the others wait.

    Attributes:
        root: the folder. None keeps the tables in the memory of each process.
    """

    root: Path | None = None

    def __call__(self, name: str, make: Callable[[], Tables]) -> Tables:
        """Return the tables of the group ``name``. On first use ``make`` builds them.

        Raises:
            DataError: the folder cannot be written to, or its contents are damaged.
        """
        if self.root is None:
            return make()
        folder = self.root / name
        try:
            make_once(folder, lambda temporary: _write(temporary, make()))
            return _read(folder)
        except OSError as error:
            hint = "free some space, or choose another folder with --data-cache-dir"
            raise DataError(f"the sample index cannot be saved: {error}", where=str(self.root), hint=hint) from error


def _read(folder: Path) -> Tables:
    files = sorted(folder.glob("*.npy"))
    try:
        # Use plain views, because indexing numpy's memmap class is several times slower.
        return {file.stem: np.asarray(np.load(file, mmap_mode="r")) for file in files}
    except (ValueError, EOFError) as error:  # truncated by a crash of the machine or a full disk
        hint = "delete this folder; it will be created again"
        raise DataError("the cache of the sample index is damaged", where=str(folder), hint=hint) from error


def _write(folder: Path, tables: Tables) -> None:
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)


def make_once(folder: Path, write: Callable[[Path], object]) -> None:
    """Create a folder unless it exists. If several processes ask at once, the first creates it and the others wait.

    Args:
        folder: the folder, which is either complete or absent.
        write: fills a new folder that has a temporary name.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the process ends in any way
        if not folder.is_dir():
            with new_folder(folder) as temporary:
                write(temporary)


CACHE_VERSION = 3
"""Part of a cache's name. Increase it when the meaning of the cached files changes."""

NAME = "corpus"


@dataclass(frozen=True)
class CorpusEntry:
    """One corpus of ``--data-path``.

    Attributes:
        paths: the prefix of an indexed set, or the files, folders and globs of raw text.
        indexed: whether it is an indexed set.
        weight: its weight in a blend as written by the user. None without weights.
    """

    paths: tuple[str, ...]
    indexed: bool
    weight: str | None = None


@dataclass(frozen=True)
class Corpus:
    """An open corpus.

    Attributes:
        dataset: its tokens.
        weight: see :class:`CorpusEntry`.
        skipped: ``file:line: reason`` of the lines that were left out when it was tokenized.
        notes: remarks for the user.
    """

    dataset: IndexedDataset
    weight: str | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_data_path(words: Sequence[str]) -> list[CorpusEntry]:
    """Parse ``--data-path``: ``A``, ``A B``, or with weights ``0.3 A 0.7 B``.

    Without weights, all raw text together is one corpus, in the order of the files. Each indexed set is one corpus.

    Raises:
        DataError: nothing is named, or weights and paths do not alternate.
    """
    if not words:
        raise no_corpus_error()
    if pairs := weighted(words, "--data-path"):
        return [CorpusEntry((path,), is_indexed(path), weight) for weight, path in pairs]
    raw = tuple(word for word in words if not is_indexed(word))
    entries = [CorpusEntry((word,), indexed=True) for word in words if is_indexed(word)]
    return [CorpusEntry(raw, indexed=False), *entries] if raw else entries


def check_corpora(config: RunConfig) -> None:
    """Check ``--data-path`` before anything is tokenized.

    Raises:
        DataError: a flag for raw text is set but there is none. Also the errors of :func:`parse_data_path`,
            :func:`text_files` and :class:`IndexedDataset`.
    """
    entries = parse_data_path(config.data.data_path or ())
    if config.data.streaming:
        streamed_corpus(config.data)
    files: list[Path] = []
    for entry in entries:
        if entry.indexed:
            IndexedDataset(entry.paths[0])
        else:
            files += text_files(entry.paths, "--data-path")
    for flag in ("text_column", "skip_bad_lines"):
        if all(entry.indexed for entry in entries) and getattr(config.data, flag):
            where = f"{spelling(flag)} ({config.origin(flag)})"
            hint = "leave it out; an indexed data set holds tokens"
            raise DataError(f"there is no raw text for {spelling(flag)}", where=where, hint=hint)
    if config.origin("text_unit") != "default" and not any(data_suffix(file) == ".txt" for file in files):
        where = f"--text-unit ({config.origin('text_unit')})"
        message = "there is no .txt file for --text-unit"
        raise DataError(message, where=where, hint="leave it out; other formats have rows")


def streamed_corpus(flags: DataFlags) -> list[Path]:
    """Return the raw text files of a streamed corpus.

    Raises:
        DataError: ``--data-path`` names an indexed set, or a blend.
    """
    entries = parse_data_path(flags.data_path or ())
    if len(entries) > 1 or entries[0].indexed or entries[0].weight is not None:
        what = "a blend" if entries[0].weight is not None else "an indexed data set"
        hint = "name only files of raw text, or leave --streaming out: an indexed set is never read whole"
        raise DataError(f"{what} cannot be streamed", where="--data-path", hint=hint)
    return text_files(entries[0].paths, "--data-path")


def load_corpora(config: RunConfig, tokenizer: PreTrainedTokenizerFast, end_token_id: int) -> list[Corpus]:
    """Open the corpora of ``--data-path``. Raw text is tokenized on first use.

    If several processes call this at once, the first tokenizes and the others wait for it.

    Raises:
        DataError: a file cannot be read, a corpus has no document, an indexed set is damaged, or one has tokens outside
            of the vocabulary.
    """
    corpora = []
    for entry in parse_data_path(config.data.data_path or ()):
        if entry.indexed:
            dataset = IndexedDataset(entry.paths[0], config.data.data_impl)
            _check_tokens(dataset, tokenizer, IndexCache(cache_root(config)))
            corpora.append(Corpus(dataset, entry.weight))
        else:
            corpora.append(_tokenized(entry, config, tokenizer, end_token_id))
    return corpora


def _check_tokens(dataset: IndexedDataset, tokenizer: PreTrainedTokenizerFast, cache: IndexCache) -> None:
    """Check that a set was made with this vocabulary, and has no token outside of it.

    Sets from other programs do not record their vocabulary. A set without checksums is read once for its largest token.
    """
    sums = read_sums(dataset.prefix)
    if sums is not None and sums.get("vocabulary") not in (None, vocabulary_id(tokenizer.backend_tokenizer)):
        message = "the set was tokenized with another vocabulary than this run's"
        hint = "name the tokenizer that made it (--tokenizer-type, --tokenizer-path), or tokenize the text again"
        raise DataError(message, where=dataset.prefix, hint=hint)
    vocabulary = vocabulary_size(tokenizer)
    if sums is not None and sums["bin"]["bytes"] == bin_path(dataset.prefix).stat().st_size:
        largest = sums["largest_token"]
    else:
        name = "largest-" + hash_of(dataset.version)
        table = cache(name, lambda: {"largest": np.array([check_vocabulary(dataset, vocabulary)])})
        largest = int(table["largest"][0])
    check_vocabulary(dataset, vocabulary, largest)


def _tokenized(entry: CorpusEntry, config: RunConfig, tokenizer: PreTrainedTokenizerFast, end_token_id: int) -> Corpus:
    """Return raw text as a tokenized corpus from the cache."""
    files = text_files(entry.paths, "--data-path")
    column, skip, unit = config.data.text_column or "text", config.data.skip_bad_lines, config.data.text_unit
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    # Truncation and padding are state from the last call of the tokenizer, not part of its definition.
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {name: value for name, value in definition.items() if name not in ("truncation", "padding")}
    root = cache_root(config)
    folder = root / ("text-" + hash_of([CACHE_VERSION, stats, model, [end_token_id, column, skip, unit]]))
    notes = []
    began = time.perf_counter()
    if not folder.is_dir():
        recipe = recipe_of(config, tokenizer, end_token_id)
        try:
            # Tokenize in this process. New ones would run the user's script, which may have no ``__main__`` guard.
            make_once(folder, lambda temporary: preprocess(files, str(temporary / NAME), recipe, workers=0))
        except OSError as error:
            hint = "check the folder and its rights, or choose another one with --data-cache-dir"
            raise DataError(f"the corpus cannot be tokenized: {error}", where=str(root), hint=hint) from error
        seconds, megabytes = time.perf_counter() - began, sum(size for _, size, _ in stats) / 1e6
        kept = f"are kept in {folder}"
        kept += "; rapidformer data preprocess does it with all cores" if seconds > 30 else ""
        notes.append(f"{megabytes:,.1f} MB of raw text were tokenized in {seconds:.0f} s, and {kept}")
    try:
        dataset = IndexedDataset(folder / f"{NAME}_{column}_document", config.data.data_impl)
    except DataError as error:
        message = f"the cache of the tokenized corpus is damaged: {error.message}"
        raise DataError(message, where=str(folder), hint="delete this folder; it will be created again") from error
    skipped = folder / f"{NAME}.skipped.txt"
    lines = skipped.read_text(encoding="utf-8").splitlines() if skipped.is_file() else []
    return Corpus(dataset, entry.weight, tuple(lines), tuple(notes))


def recipe_of(config: RunConfig, tokenizer: PreTrainedTokenizerFast, end_token_id: int) -> EncodingRecipe:
    """Return how the raw text of ``--data-path`` is tokenized."""
    return EncodingRecipe(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        dtype=type_for(vocabulary_size(tokenizer)).name,
        end=end_token_id,
        keys=(config.data.text_column or "text",),
        skip=config.data.skip_bad_lines,
        keys_flag="--text-column",
        vocabulary=vocabulary_id(tokenizer.backend_tokenizer),
        text_unit=config.data.text_unit,
    )
