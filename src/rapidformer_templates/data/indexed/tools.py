"""Joins, checks, splits and summarizes indexed data sets, all in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from rapidformer_templates.data.indexed.dataset import CHUNK, IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import IndexedWriter, read_sums, sums_of, sums_path, write_sums
from rapidformer_templates.data.text.files import prefix_of
from rapidformer_templates.errors import DataError, did_you_mean
from rapidformer_templates.system.files import crc32


def prefixes_of(inputs: Sequence[str], leave_out: str | None = None) -> list[str]:
    """Return the prefixes of the data sets that the inputs name. A folder gives all of its sets, sorted by name.

    Args:
        inputs: folders and prefixes.
        leave_out: a prefix that is skipped in folders, such as that of the output.

    Raises:
        DataError: an input is neither, or a folder has no set.
    """
    prefixes: list[str] = []
    for name in inputs:
        if Path(name).is_dir():
            # Tokens with checksums but no index count, too, so that a loss is noticed.
            with_sums = [str(path).removesuffix(".sums.json") for path in Path(name).glob("*.sums.json")]
            with_index = {prefix_of(path) for path in Path(name).glob("*.idx")}
            inside = sorted(with_index | {prefix for prefix in with_sums if bin_path(prefix).is_file()})
            inside = [prefix for prefix in inside if leave_out is None or Path(prefix) != Path(leave_out)]
            if not inside:
                hint = "rapidformer data preprocess makes PREFIX.bin and PREFIX.idx"
                raise DataError(f"there is no indexed data set in {name}", where=name, hint=hint)
            prefixes += inside
        else:
            prefix = prefix_of(name)
            if not (idx_path(prefix).is_file() or bin_path(prefix).is_file()):
                parent = Path(prefix).parent
                neighbours = [prefix_of(path) for path in parent.glob("*.idx")] if parent.is_dir() else []
                advice = "give the path of PREFIX.bin and PREFIX.idx without their endings"
                hint = did_you_mean(prefix, neighbours, advice)
                raise DataError(f"there is no indexed data set {prefix}", where=name, hint=hint)
            prefixes.append(prefix)
    return prefixes


def merge(prefixes: Sequence[str], output: str, *, overwrite: bool = False) -> IndexedDataset:
    """Concatenate the documents of several sets into one set.

    Their dtypes may differ. numpy's common dtype can represent all of them, and the format supports it.

    Args:
        prefixes: the sets, in order.
        output: prefix of the new set, which must not be one of the inputs.
        overwrite: replace an existing set.

    Raises:
        DataError: a set is damaged, has modes, or has another vocabulary than an earlier one. Also if the output is one
            of the inputs or exists.
    """
    if any(Path(prefix).resolve() == Path(prefix_of(output)).resolve() for prefix in prefixes):
        raise DataError("the output is one of the inputs", where="--output-prefix", hint="choose another prefix")
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    for one in sets:
        if one.has_modes:
            hint = "join such sets with the tools that made them"
            message = "the set holds modes (images with text), which cannot be joined"
            raise DataError(message, where=one.prefix, hint=hint)
    all_sums = {prefix: read_sums(prefix) for prefix in prefixes}
    vocabularies = {prefix: sums.get("vocabulary") if sums else None for prefix, sums in all_sums.items()}
    recorded = {prefix: name for prefix, name in vocabularies.items() if name}
    if len(set(recorded.values())) > 1:
        first, other = next((a, b) for a in recorded for b in recorded if recorded[a] != recorded[b])
        hint = "tokenize the text of one of them again"
        raise DataError(f"{first} was tokenized with another vocabulary", where=other, hint=hint)
    # If one of the sets does not record its vocabulary, that of the new set is unknown.
    vocabulary = None if None in vocabularies.values() else next(iter(recorded.values()), None)
    dtype = np.result_type(*(one.dtype for one in sets))
    with IndexedWriter(output, dtype, overwrite=overwrite, vocabulary=vocabulary) as writer:
        for one in sets:
            _copy(one, writer)
    return IndexedDataset(output)


def _copy(dataset: IndexedDataset, writer: IndexedWriter) -> None:
    """Copy all documents, up to :data:`CHUNK` tokens or one document at a time."""
    first, count, size = 0, len(dataset.documents) - 1, dataset.dtype.itemsize
    while first < count:
        start = int(dataset.pointers[dataset.documents[first]])
        sequence = np.searchsorted(dataset.pointers, start + CHUNK * size, side="right") - 1
        last = int(np.searchsorted(dataset.documents, sequence, side="right")) - 1
        last = max(last, first + 1)
        bounds = dataset.documents[first : last + 1]
        lengths = dataset.lengths[bounds[0] : bounds[-1]]
        tokens = dataset.tokens[start // size : start // size + int(lengths.sum(dtype=np.int64))]
        writer.add(tokens.astype(writer.dtype, copy=False), lengths, np.diff(bounds))
        first = last


@dataclass(frozen=True)
class Damage:
    """A part of a set whose bytes have changed since it was written.

    Attributes:
        file: the damaged file.
        what: the part, and the documents in it.
    """

    file: str
    what: str


def verify(prefix: str) -> list[Damage] | None:
    """Compare the bytes of a set with its checksums.

    The set is opened first, which finds inconsistencies between its files.

    Returns:
        The damaged parts. None if the set has no checksums, so that its contents cannot be checked.

    Raises:
        DataError: the two files do not match, or the checksums are damaged or belong to another set.
    """
    dataset = IndexedDataset(prefix)
    sums = read_sums(prefix)
    if sums is None:
        return None
    path, size = bin_path(prefix), sums["bin"]["block_bytes"]
    if sums["bin"]["bytes"] != path.stat().st_size:
        hint = "delete them, or create them again with --write-sums if you trust the set"
        raise DataError("the checksums belong to another set", where=str(sums_path(prefix)), hint=hint)
    problems = []
    if crc32(idx_path(prefix)) != sums["idx"]["crc32"]:
        what = "the index differs from what was written: documents may end elsewhere"
        problems.append(Damage(str(idx_path(prefix)), what))
    checksums = sums_of(path, size).checksums()
    for block, (recorded, checksum) in enumerate(zip(sums["bin"]["crc32"], checksums, strict=True)):
        if recorded != checksum:
            start, stop = block * size, min((block + 1) * size, dataset.token_count * dataset.dtype.itemsize)
            inside = np.searchsorted(dataset.pointers, [start, stop - 1], side="right") - 1
            first, last = np.searchsorted(dataset.documents, inside, side="right") - 1
            documents = f"document {first:,}" if first == last else f"documents {first:,} to {last:,}"
            what = f"bytes {start:,} to {stop - 1:,} differ from what was written: {documents}"
            problems.append(Damage(str(path), what))
    return problems


def add_sums(prefix: str) -> Path:
    """Write ``PREFIX.sums.json`` for a set from another program. This reads all tokens.

    Raises:
        DataError: the set is damaged, or cannot be written to.
    """
    dataset = IndexedDataset(prefix)
    largest = -1
    for start in range(0, dataset.token_count, CHUNK):
        part = dataset.tokens[start : min(start + CHUNK, dataset.token_count)]
        largest = max(largest, int(part.max()))
        if int(part.min()) < 0:
            hint = "a token is a number of at least 0: the set is damaged, or of another kind"
            raise DataError(f"there are negative tokens, such as {int(part.min())}", where=prefix, hint=hint)
    write_sums(prefix, largest)
    return sums_path(prefix)


@dataclass(frozen=True)
class DataSetStatistics:
    """Statistics of a set.

    Attributes:
        documents, sequences, tokens: their numbers.
        dtype: dtype of the tokens.
        bytes: size of both files.
        mean, longest, shortest: tokens per document.
        shares: documents below each power of two: (upper bound of the length, documents, tokens).
        largest: the largest token if the checksums record it.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    mean: float
    longest: int
    shortest: int
    shares: list[tuple[int, int, int]]
    largest: int | None


def statistics_of(prefix: str) -> DataSetStatistics:
    """Summarize a set. Only its index is read.

    Raises:
        DataError: the set is damaged.
    """
    dataset = IndexedDataset(prefix)
    count = len(dataset.documents) - 1
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    longest, shortest = 0, 0
    for first in range(0, count, CHUNK):
        bounds = dataset.documents[first : first + CHUNK + 1]
        lengths = np.add.reduceat(dataset.lengths[bounds[0] : bounds[-1]], bounds[:-1] - bounds[0], dtype=np.int64)
        powers = np.frexp(lengths.astype(np.float64))[1]  # length < 2 ** power
        documents += np.bincount(powers, minlength=64)
        tokens += np.bincount(powers, weights=lengths, minlength=64).astype(np.int64)
        longest = max(longest, int(lengths.max()))
        shortest = min(shortest or int(lengths.min()), int(lengths.min()))
    shares = [(1 << power, int(documents[power]), int(tokens[power])) for power in np.flatnonzero(documents).tolist()]
    sums = read_sums(prefix)
    return DataSetStatistics(
        dataset.prefix,
        count,
        len(dataset),
        dataset.token_count,
        dataset.dtype.name,
        bin_path(dataset.prefix).stat().st_size + idx_path(dataset.prefix).stat().st_size,
        dataset.token_count / max(count, 1),
        longest,
        shortest,
        shares,
        sums["largest_token"] if sums else None,
    )


def split_shares(split: str) -> list[float]:
    """Return the three shares of ``--split``. Missing shares are 0.

    Raises:
        DataError: the text is not one to three shares, or they sum to 0.
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
    """Return the sequences [first, last) of each part. Each sequence is in one part.

    Shares are accumulated and rounded as in Megatron-LM's core.
    """
    parts: list[float] = (np.asarray(shares) / np.sum(shares)).tolist()
    return list(pairwise(round(share * count) for share in accumulate(parts, initial=0.0)))


def counts_of(dataset: IndexedDataset, part: tuple[int, int]) -> np.ndarray:
    """Count the tokens in the sequences [first, last), shape (largest token + 1,). Reads the tokens once.

    Raises:
        DataError: a token is negative.
    """
    counts, span = np.zeros(0, np.int64), dataset.span(*part)
    for start in range(span.start, span.stop, CHUNK):
        tokens = dataset.tokens[start : min(start + CHUNK, span.stop)]
        if int(tokens.min()) < 0:
            raise DataError(f"there are negative tokens, such as {int(tokens.min())}", where=dataset.prefix)
        occurrences = np.bincount(tokens)
        longer, shorter = (occurrences, counts) if len(occurrences) > len(counts) else (counts, occurrences)
        counts = longer.astype(np.int64)
        counts[: len(shorter)] += shorter
    return counts


def unigram_loss(dataset: IndexedDataset, train: tuple[int, int], held_out: tuple[int, int]) -> float:
    """Return the mean negative log-likelihood of the held-out tokens under the training counts, in nats per token.

    One is added to each count (Laplace), so that tokens missing in the training part have a probability.
    """
    train_counts, held_out_counts = counts_of(dataset, train), counts_of(dataset, held_out)
    size = max(len(train_counts), len(held_out_counts))
    train_counts, held_out_counts = (np.pad(n, (0, size - len(n))) for n in (train_counts, held_out_counts))
    likelihood = np.log(train_counts + 1) - np.log(train_counts.sum() + size)
    return float(-(held_out_counts * likelihood).sum() / held_out_counts.sum())
