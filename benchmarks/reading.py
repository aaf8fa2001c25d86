"""``bench reading``: how fast samples and documents come out of an indexed data set, beside megatron-core.

Both read the same files, in turns, and what they give is compared before anything is timed. The limit is
a plain gather: rows of a token array in memory, copied and nothing else.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table

from rapidformer_templates.commands.bench.output import Advance, progress, put_out, spread, why_absent
from rapidformer_templates.data.collate import WindowCollate
from rapidformer_templates.data.indexed.cache import IndexCache
from rapidformer_templates.data.indexed.dataset import HEADER, MAGIC, VERSION, IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import Request
from rapidformer_templates.data.pretraining.gpt import GPTSamples
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTH, BATCH, SEED = 2048, 32, 1234
BATCHES, DOCUMENTS = 40, 20_000
"""Batches, and documents, a turn."""

OURS, PEER, LIMIT = "this library", "megatron-core", "a plain gather"
SAMPLES_GOAL, DOCUMENTS_GOAL, FIRST_GOAL = 15.0, 2.5, 2.0

Turn = Callable[[np.ndarray], object]
"""Reads what stands at the given indices."""


@dataclass
class Contest:
    """Readers of the same things, in turns.

    Attributes:
        what: they read.
        count: how many a turn.
        seconds: of each turn, by reader.
    """

    what: str
    count: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def take_turns(self, readers: dict[str, Turn], choices: Sequence[np.ndarray], advance: Advance) -> None:
        """One turn each for every choice of indices; the first is a warm-up and does not count."""
        for number, choice in enumerate(choices):
            for name, read in readers.items():
                began = time.perf_counter()
                read(choice)
                if number:
                    self.seconds.setdefault(name, []).append(time.perf_counter() - began)
            advance(f"{self.what}: turn {number}")

    def rates(self, name: str) -> list[float]:
        return [self.count / seconds for seconds in self.seconds[name]]

    def ratios(self, name: str) -> list[float]:
        """Our speed over another's, turn by turn."""
        return [theirs / ours for theirs, ours in zip(self.seconds[name], self.seconds[OURS], strict=True)]


def make_corpus(prefix: Path, tokens: int) -> None:
    """Random tokens in documents of log-normal lengths, about 600 on average."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(max(1, tokens // 6_000_000)):
            lengths = np.maximum(1, generator.lognormal(6, 0.9, 10_000).astype(np.int64))
            writer.add(generator.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16), lengths)


def _our_batches(samples: GPTSamples) -> Turn:
    data = Data(samples, collate=WindowCollate())

    def read(choice: np.ndarray) -> None:
        requests = [Request(batch, (SEED, 2), batch) for batch in choice.reshape(-1, BATCH).tolist()]
        for _ in load(samples, data, requests, workers=0, pin_memory=False):
            pass

    return read


def _their_batches(samples: Any) -> Turn:
    def read(choice: np.ndarray) -> None:
        batches = choice.reshape(-1, BATCH).tolist()
        for _ in torch.utils.data.DataLoader(samples, batch_sampler=batches):
            pass

    return read


def _gathered(dataset: IndexedDataset) -> Turn:
    count = dataset.token_count // (LENGTH + 1)
    rows = np.array(dataset.tokens[0 : count * (LENGTH + 1)]).reshape(count, LENGTH + 1)

    def read(choice: np.ndarray) -> None:
        for batch in choice.reshape(-1, BATCH):
            torch.from_numpy(rows[batch % count])

    return read


def measure_samples(prefix: Path, cache: Path, rounds: int, peer: bool, advance: Advance) -> Contest:
    """Batches of shuffled samples.

    Raises:
        RapidformerError: megatron-core gave other samples.
    """
    dataset = IndexedDataset(prefix)
    ours = GPTSamples(dataset, (0, len(dataset)), LENGTH, SEED, cache=IndexCache(cache))
    readers = {OURS: _our_batches(ours), LIMIT: _gathered(dataset)}
    if peer:
        theirs = _megatron_samples(prefix, cache, len(dataset))
        for place in range(0, len(ours), max(1, len(ours) // 50)):
            tokens, sample = ours[place]["input_ids"], theirs[place]
            if not (np.array_equal(tokens[:-1], sample["tokens"]) and np.array_equal(tokens[1:], sample["labels"])):
                raise RapidformerError(f"sample {place} is another than {PEER}'s", where="bench reading")
        readers[PEER] = _their_batches(theirs)
    generator = np.random.default_rng(1)
    choices = [generator.integers(0, len(ours), BATCHES * BATCH) for _ in range(rounds + 1)]
    contest = Contest(f"samples of {LENGTH:,} tokens, batches of {BATCH}", BATCHES * BATCH)
    contest.take_turns(readers, choices, advance)
    return contest


def measure_documents(prefix: Path, rounds: int, peer: bool, advance: Advance) -> Contest:
    """Random documents, one by one."""
    dataset = IndexedDataset(prefix)
    readers: dict[str, Turn] = {OURS: lambda choice: [dataset[i] for i in choice.tolist()]}
    if peer:
        from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs

        theirs = Theirs(str(prefix))
        readers[PEER] = lambda choice: [theirs[i] for i in choice.tolist()]
    generator = np.random.default_rng(2)
    choices = [generator.integers(0, len(dataset), DOCUMENTS) for _ in range(rounds + 1)]
    contest = Contest("random documents", DOCUMENTS)
    contest.take_turns(readers, choices, advance)
    return contest


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
    """What megatron-core asks of a tokenizer."""

    eod, pad, vocab_size = 0, 50_300, 50_304
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - megatron-core writes it into a hash


@dataclass(frozen=True)
class FirstBatch:
    """A large index, from opening the files to the first batch, in processes of their own.

    Attributes:
        samples: in the index.
        make_seconds: the first time, when its tables are made.
        open_seconds: every other time.
        anonymous_mb: memory of a reader of its own after the first batch, and after many.
    """

    samples: int
    make_seconds: float
    open_seconds: float
    anonymous_mb: tuple[float, float]


def measure_first_batch(folder: Path, samples: int) -> FirstBatch:
    """A corpus with ``samples`` samples in a sparse file: its tokens take no room."""
    prefix, documents = folder / "large", max(1, samples // 100)
    write_sparse(prefix, documents, 100 * LENGTH + 1)
    context = multiprocessing.get_context("spawn")
    results = []
    for _ in range(2):
        with context.Pool(1) as pool:  # a process that has read nothing yet
            results.append(pool.apply(_first_batch, (prefix, folder / "cache")))
    (made, _, _), (opened, before, after) = results
    return FirstBatch(samples, made, opened, (before, after))


def _first_batch(prefix: Path, cache: Path) -> tuple[float, float, float]:
    """(seconds to the first batch, anonymous memory in MB after it, and after 300 more)."""
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
    """Memory of this process that is no mapped file, MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


def write_sparse(prefix: Path, documents: int, length: int) -> None:
    """An indexed set of equal documents whose tokens are a hole in the file."""
    pointers = np.arange(documents, dtype="<i8") * (2 * length)
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        file.write(np.full(documents, length, "<i4").tobytes())
        file.write(pointers.tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * length * documents)


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    keep_freed_memory()  # as a run on a CPU does
    absent = why_absent("megatron", "megatron-core")
    rounds, peer = options.repeats, absent is None
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as name,
        progress("reading", 2 * (rounds + 1) + 2) as advance,
    ):
        folder = Path(name)
        make_corpus(folder / "corpus", int(options.megatokens * 1e6))
        advance("corpus")
        contests = [
            measure_samples(folder / "corpus", folder / "cache", rounds, peer, advance),
            measure_documents(folder / "corpus", rounds, peer, advance),
        ]
        first = measure_first_batch(folder, options.samples)
        advance("first batch")
    notes = _notes(contests, first) + ([f"absent: {PEER}: {absent}"] if absent else [])
    result = {"contests": [vars(contest) for contest in contests], "first_batch": vars(first)}
    put_out(options, "reading", result, _table(contests), notes, lambda axes: _draw(axes, contests))
    return 0


def _table(contests: list[Contest]) -> Table:
    table = Table(title="read a second, mean ± standard deviation over turns")
    for heading in ("what", "reader", "a second", "this library is faster by"):
        table.add_column(heading, justify="left" if heading in ("what", "reader") else "right")
    for contest in contests:
        for name in contest.seconds:
            rates, ratios = contest.rates(name), contest.ratios(name)
            factor = "" if name == OURS else f"{statistics.median(ratios):.2f} ± {spread(ratios):.2f} ×"
            table.add_row(contest.what, name, f"{statistics.mean(rates):,.0f} ± {spread(rates):,.0f}", factor)
    return table


def _notes(contests: list[Contest], first: FirstBatch) -> list[str]:
    notes = []
    for contest, goal in zip(contests, (SAMPLES_GOAL, DOCUMENTS_GOAL), strict=True):
        if PEER in contest.seconds:
            ratio = statistics.median(contest.ratios(PEER))
            notes.append(f"{contest.what}: {ratio:.2f} × {PEER} (median); goal {goal:g} ×: {_verdict(ratio >= goal)}")
    notes.append(
        f"first batch of {first.samples:,} samples: {first.open_seconds:.2f} s; goal {FIRST_GOAL:g} s: "
        f"{_verdict(first.open_seconds <= FIRST_GOAL)} (the first time, when the index is made: "
        f"{first.make_seconds:.1f} s)"
    )
    before, after = first.anonymous_mb
    notes.append(f"memory of a reader besides mapped files: {before:,.0f} MB, after 9,600 samples more {after:,.0f} MB")
    return notes


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _draw(axes: Axes, contests: list[Contest]) -> None:
    contest = contests[0]
    names = list(contest.seconds)
    rates = [contest.rates(name) for name in names]
    colours = ["tab:orange" if name == OURS else "tab:blue" for name in names]
    bars = axes.barh(names, [statistics.mean(r) for r in rates], xerr=[spread(r) for r in rates], color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.set_xscale("log")
    axes.set_xlabel(f"{contest.what}, a second")
    axes.margins(x=0.2)
    axes.invert_yaxis()
