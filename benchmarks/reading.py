"""``benchmarks reading``: how fast an indexed data set reads samples and documents, compared with megatron-core.

Both read the same files, in turns. Their results are compared before anything is timed. The upper limit is a plain
gather, which only copies rows of a token array in memory.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.contest import (
    Advance,
    Answer,
    Contest,
    Flag,
    asks,
    bars,
    mean_sd,
    median_sd,
    progress,
    table,
    verdict,
    why_absent,
)
from benchmarks.workers import run_in_workers
from rapidformer_templates.data.collate import WindowCollate
from rapidformer_templates.data.indexed.corpora import IndexCache
from rapidformer_templates.data.indexed.dataset import HEADER, MAGIC, VERSION, IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.pretraining.samples import GPTSamples
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.process_state import keep_freed_memory

LENGTH, BATCH, SEED = 2048, 32, 1234
BATCHES, DOCUMENTS = 40, 20_000
"""Batches and documents per turn."""

SAMPLES = f"samples of {LENGTH:,} tokens, batches of {BATCH}"
OURS, PEER, LIMIT = "this library", "megatron-core", "a plain gather"
SAMPLES_GOAL, DOCUMENTS_GOAL, FIRST_GOAL = 15.0, 2.5, 2.0

Read = Callable[[np.ndarray], object]
"""Reads the entries at the given indices."""


def _contest(readers: dict[str, Read], choices: list[np.ndarray], advance: Advance) -> Contest:
    """Time readers of the same entries. There is a turn for each choice of indices. The first one is a warm-up."""
    left = {name: iter(choices) for name in readers}

    def turn(name: str) -> None:
        readers[name](next(left[name]))

    contest = Contest({name: partial(turn, name) for name in readers}, work=len(choices[0]))
    contest.run(len(choices) - 1, warmup=1, advance=advance)
    return contest


def make_corpus(prefix: Path, tokens: int) -> None:
    """Write random tokens in documents of log-normal lengths, about 600 on average."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(max(1, tokens // 6_000_000)):
            lengths = np.maximum(1, generator.lognormal(6, 0.9, 10_000).astype(np.int64))
            writer.add(generator.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16), lengths)


def _our_batches(samples: GPTSamples) -> Read:
    data = Data(samples, collate=WindowCollate())

    def read(choice: np.ndarray) -> None:
        requests = [BatchRequest(batch, (SEED, 2), batch) for batch in choice.reshape(-1, BATCH).tolist()]
        for _ in load(samples, data, requests, workers=0, pin_memory=False):
            pass

    return read


def _their_batches(samples: Any) -> Read:
    def read(choice: np.ndarray) -> None:
        batches = choice.reshape(-1, BATCH).tolist()
        for _ in torch.utils.data.DataLoader(samples, batch_sampler=batches):
            pass

    return read


def _gathered(dataset: IndexedDataset) -> Read:
    count = dataset.token_count // (LENGTH + 1)
    rows = np.array(dataset.tokens[0 : count * (LENGTH + 1)]).reshape(count, LENGTH + 1)

    def read(choice: np.ndarray) -> None:
        for batch in choice.reshape(-1, BATCH):
            torch.from_numpy(rows[batch % count])

    return read


def measure_samples(prefix: Path, cache: Path, rounds: int, peer: bool, advance: Advance) -> Contest:
    """Time the reading of batches of shuffled samples.

    Raises:
        RapidformerError: megatron-core returned different samples.
    """
    dataset = IndexedDataset(prefix)
    ours = GPTSamples(dataset, (0, len(dataset)), LENGTH, SEED, cache=IndexCache(cache))
    readers = {OURS: _our_batches(ours), LIMIT: _gathered(dataset)}
    if peer:
        theirs = _megatron_samples(prefix, cache, len(dataset))
        for place in range(0, len(ours), max(1, len(ours) // 50)):
            tokens, sample = ours[place]["input_ids"], theirs[place]
            if not (np.array_equal(tokens[:-1], sample["tokens"]) and np.array_equal(tokens[1:], sample["labels"])):
                raise RapidformerError(f"sample {place} differs from {PEER}'s", where="benchmarks reading")
        readers[PEER] = _their_batches(theirs)
    generator = np.random.default_rng(1)
    choices = [generator.integers(0, len(ours), BATCHES * BATCH) for _ in range(rounds + 1)]
    return _contest(readers, choices, advance)


def measure_documents(prefix: Path, rounds: int, peer: bool, advance: Advance) -> Contest:
    """Time the reading of random documents, one by one."""
    dataset = IndexedDataset(prefix)
    readers: dict[str, Read] = {OURS: lambda choice: [dataset[i] for i in choice.tolist()]}
    if peer:
        from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs

        theirs = Theirs(str(prefix))
        readers[PEER] = lambda choice: [theirs[i] for i in choice.tolist()]
    generator = np.random.default_rng(2)
    choices = [generator.integers(0, len(dataset), DOCUMENTS) for _ in range(rounds + 1)]
    return _contest(readers, choices, advance)


def _megatron_samples(prefix: Path, cache: Path, documents: int) -> Any:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        split="1",
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(cache / "megatron"),
    )
    every = np.arange(documents, dtype=np.int32)
    return GPTDataset(Theirs(str(prefix)), str(prefix), every, None, Split.train, config)


class _Tokenizer:
    """A tokenizer with everything that megatron-core needs."""

    eod, pad, vocab_size = 0, 50_300, 50_304
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - megatron-core writes it into a hash


class FirstBatch(NamedTuple):
    """Cost of a large index, from opening the files to the first batch. Each reader is a separate process.

    Attributes:
        samples: Number of samples in the index.
        make_seconds: Seconds of the first time, which builds the tables.
        open_seconds: Seconds of every later time.
        anonymous_mb: Private memory of a reader after the first batch, and after many.
    """

    samples: int
    make_seconds: float
    open_seconds: float
    anonymous_mb: tuple[float, float]


def measure_first_batch(folder: Path, samples: int) -> FirstBatch:
    """Measure a corpus with ``samples`` samples in a sparse file, whose tokens take no disk space."""
    prefix, documents = folder / "large", max(1, samples // 100)
    write_sparse(prefix, documents, 100 * LENGTH + 1)
    # Each in a process that has not read anything yet.
    results = [run_in_workers(_first_batch, prefix, folder / "cache")[0] for _ in range(2)]
    (made, _, _), (opened, before, after) = results
    return FirstBatch(samples, made, opened, (before, after))


def _first_batch(prefix: Path, cache: Path) -> tuple[float, float, float]:
    """Return the seconds to the first batch, the anonymous memory in MB after it, and the same after 300 more."""
    began = time.perf_counter()
    dataset = IndexedDataset(prefix)
    samples = GPTSamples(dataset, (0, len(dataset)), LENGTH, SEED, cache=IndexCache(cache))
    read = _our_batches(samples)
    read(np.arange(BATCH))
    seconds = time.perf_counter() - began
    before = _anonymous_mb()
    read(np.random.default_rng(3).integers(0, len(samples), 300 * BATCH))
    return seconds, before, _anonymous_mb()


def _anonymous_mb() -> float:
    """Return the memory of this process that is not a mapped file, in MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


def write_sparse(prefix: Path, documents: int, length: int) -> None:
    """Write an indexed set of equal documents whose tokens are a hole in the file."""
    pointers = np.arange(documents, dtype="<i8") * (2 * length)
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        file.write(np.full(documents, length, "<i4").tobytes())
        file.write(pointers.tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * length * documents)


@asks(
    Flag("repeats", 10, "turns per reader"),
    Flag("megatokens", 60.0, "size of the corpus"),
    Flag("samples", 10**8, "in the large index"),
    Flag("folder", None, "where to make the corpus (default: temporary files)"),
)
def answer(options: argparse.Namespace) -> Answer:
    keep_freed_memory()  # as in a run on a CPU
    absent = why_absent("megatron", "megatron-core")
    rounds, peer = options.repeats, absent is None
    with tempfile.TemporaryDirectory(dir=options.folder) as name, progress("reading", 2 * (rounds + 1) + 2) as advance:
        folder = Path(name)
        make_corpus(folder / "corpus", int(options.megatokens * 1e6))
        advance("corpus")
        contests = {
            SAMPLES: measure_samples(folder / "corpus", folder / "cache", rounds, peer, advance),
            "random documents": measure_documents(folder / "corpus", rounds, peer, advance),
        }
        first = measure_first_batch(folder, options.samples)
        advance("first batch")
    rows = [
        {
            "what": what,
            "reader": reader,
            "rate": mean_sd(contest.rates(reader), ",.0f"),
            "faster": "" if reader == OURS else f"{median_sd(contest.ratios(OURS, over=reader))} ×",
        }
        for what, contest in contests.items()
        for reader in contest.ways
    ]
    columns = {"what": "{what}", "reader": "{reader}", "per second": "{rate}", "this library is faster by": "{faster}"}
    samples = contests[SAMPLES]
    rates = {reader: samples.rates(reader) for reader in samples.ways}
    return Answer(
        {
            "contests": [
                {"what": what, "count": contest.work, "seconds": contest.seconds} for what, contest in contests.items()
            ],
            "first_batch": first._asdict(),
        },
        table("entries read per second, mean ± standard deviation over turns", rows, columns, left=2),
        _goals(contests, first) + ([f"absent: {PEER}: {absent}"] if absent else []),
        bars(
            f"{SAMPLES}, per second",
            rates,
            ours=[OURS],
            texts=[f"{statistics.mean(values):,.0f}" for values in rates.values()],
            more=lambda axes: axes.set_xscale("log"),
        ),
    )


def _goals(contests: dict[str, Contest], first: FirstBatch) -> list[str]:
    notes = []
    for (what, contest), goal in zip(contests.items(), (SAMPLES_GOAL, DOCUMENTS_GOAL), strict=True):
        if PEER in contest.ways:
            ratio = contest.ratio(OURS, over=PEER)
            notes.append(f"{what}: {ratio:.2f} × {PEER} (median); goal {goal:g} ×: {verdict(ratio >= goal)}")
    before, after = first.anonymous_mb
    return [
        *notes,
        f"first batch of {first.samples:,} samples: {first.open_seconds:.2f} s; goal {FIRST_GOAL:g} s: "
        f"{verdict(first.open_seconds <= FIRST_GOAL)} (the first time, which builds the index: "
        f"{first.make_seconds:.1f} s)",
        f"memory of a reader without mapped files: {before:,.0f} MB, and {after:,.0f} MB after 9,600 more samples",
    ]
