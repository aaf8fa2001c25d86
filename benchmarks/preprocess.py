"""``benchmarks preprocess``: tokens per second from raw text to an indexed data set, compared with a plain script.

All ways write the same two files from the same text, with the same tokenizer and number of worker processes. They take
turns. Each run is a separate command, so its start-up time counts. The time for an almost empty corpus is shown as
well, so that the speed without start-up can be computed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.contest import Advance, Answer, Contest, Flag, asks, bars, mean_sd, progress, table, verdict, why_absent
from benchmarks.texts import write_corpus
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import documents
from rapidformer_templates.data.text.train_tokenizer import save, train
from rapidformer_templates.errors import RapidformerError

PLAIN = "plain script (megatron-core)"
SAME = "rapidformer data preprocess, transformers' tokenizer"
FAST = "rapidformer data preprocess, gigatoken"
GOALS = {SAME: 1.5, FAST: 8.0}
"""Goals: tokens per second relative to the plain script."""

FLAT = 1.1
"""Ratio of peak memory on the large corpus to that on the small one up to which memory counts as flat."""

SMALL = 10.0
"""Megabytes of the small corpus. The tokenizer is trained on it, too."""

VOCABULARY = 50257


@dataclass
class Row:
    """Results of one way.

    Attributes:
        seconds: Seconds of each run.
        start: Seconds for the corpus with one document.
        memory: Peak memory of all processes in bytes, by megabytes of the corpus. Only for this library's ways.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    start: float = 0.0
    memory: dict[float, int] = field(default_factory=dict)

    def net(self) -> list[float]:
        return [max(seconds - self.start, 1e-9) for seconds in self.seconds]


@dataclass(frozen=True)
class Place:
    """Locations of the corpora (by megabytes) and of the tokenizer, and the number of workers."""

    folder: Path
    corpora: dict[float, Path]
    workers: int

    def command(self, name: str, corpus: Path) -> list[str]:
        tokenizer = self.folder / "tokenizer"
        files = ["--vocab-file", str(tokenizer / "vocab.json"), "--merge-file", str(tokenizer / "merges.txt")]
        common = ["--input", str(corpus), "--workers", str(self.workers), *files]
        if name == PLAIN:
            prefix = str(self.folder / "plain_text_document")
            return [sys.executable, "-m", "benchmarks.preprocess_plain", *common,
                    "--output-prefix", prefix]  # fmt: skip
        backend = "gigatoken" if name == FAST else "transformers"
        return [sys.executable, "-m", "rapidformer_templates", "data", "preprocess", *common, "--append-eod",
                "--overwrite", "--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-backend", backend,
                "--output-prefix", str(self.folder / backend)]  # fmt: skip

    def output(self, name: str) -> Path:
        stem = "plain" if name == PLAIN else "gigatoken" if name == FAST else "transformers"
        return self.folder / f"{stem}_text_document"


def measure_preprocessing(
    place: Place, names: Sequence[str], repeats: int, advance: Advance = lambda text: None
) -> tuple[int, list[Row]]:
    """Run every way ``repeats`` times on the largest corpus, in turns, then measure its memory.

    Returns:
        The number of tokens, and a row for each way.

    Raises:
        RapidformerError: A command failed, or two ways did not write the same files.
    """
    rows = [Row(name) for name in names]
    largest = max(place.corpora)
    for row in rows:
        row.start = _run(place.command(row.name, place.corpora[0.0]))
        advance(f"{row.name}: start")

    def turn(name: str) -> float:
        advance(name)
        return _run(place.command(name, place.corpora[largest]))

    contest = Contest({name: partial(turn, name) for name in names})
    contest.run(repeats)
    for row in rows:
        row.seconds = contest.seconds[row.name]
    _refuse_differences(place, names)
    tokens = IndexedDataset(place.output(names[-1])).token_count
    for row in rows:
        for megabytes in sorted(place.corpora)[1:] if row.name in GOALS else ():
            row.memory[megabytes] = _peak_memory(place.command(row.name, place.corpora[megabytes]))
            advance(f"{row.name}: memory")
    return tokens, rows


def _run(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RapidformerError("a command failed", where=" ".join(command), hint=done.stderr[-2000:])
    if "is not used" in done.stdout:
        raise RapidformerError("a fast way did not prove equal", where=" ".join(command), hint=done.stdout)
    return seconds


def _refuse_differences(place: Place, names: Sequence[str]) -> None:
    for end in ("bin", "idx"):
        contents = {name: Path(f"{place.output(name)}.{end}").read_bytes() for name in names}
        for name in names[1:]:
            if contents[name] != contents[names[0]]:
                raise RapidformerError(f"{name} and {names[0]} wrote different .{end} files: they do different work")


def _peak_memory(command: list[str]) -> int:
    """Run a command and return the peak memory of all its processes together, with shared pages counted once."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        peak = [0]
        watcher = threading.Thread(target=_watch, args=(process, peak))
        watcher.start()
        status = process.wait()
        watcher.join()
    if status:
        raise RapidformerError("a command failed", where=" ".join(command))
    return peak[0]


def _watch(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            peak[0] = max(peak[0], sum(map(_held, [root, *root.children(recursive=True)])))
        time.sleep(0.05)


def _held(process: psutil.Process) -> int:
    """Return the bytes of a process. A page shared by n processes counts as 1/n. Returns 0 if the process has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def prepare(folder: Path, megabytes: float, workers: int) -> Place:
    """Write the corpora and train the tokenizer.

    Raises:
        DataError: The machine does not have enough text.
    """
    sizes = sorted({min(SMALL, megabytes), megabytes})
    corpora = {size: folder / f"{size:g}.jsonl" for size in sizes}
    for size, path in corpora.items():
        write_corpus(path, size)
    corpora[0.0] = folder / "one.jsonl"
    corpora[0.0].write_text('{"text": "one"}\n', encoding="utf-8")
    texts = documents(corpora[sizes[0]], "text", BadLines())
    save(train(texts, "bpe", VOCABULARY), "bpe", folder / "tokenizer")
    return Place(folder, corpora, workers)


def ratios(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Return the median speed relative to the plain script, with and without start-up."""
    by_name = {row.name: row for row in rows}
    plain, own = by_name[PLAIN], by_name[name]
    whole = statistics.median(plain.seconds) / statistics.median(own.seconds)
    return whole, statistics.median(plain.net()) / statistics.median(own.net())


@asks(
    Flag("megabytes", 100.0, "of text"),
    Flag("workers", len(os.sched_getaffinity(0)), "processes that tokenize"),
    Flag("repeats", 3, "runs per way"),
)
def answer(options: argparse.Namespace) -> Answer:
    absent = {
        PLAIN: why_absent("megatron", "--no-deps megatron-core"),
        SAME: None,
        FAST: why_absent("gigatoken", "gigatoken"),
    }
    names = [name for name, why in absent.items() if why is None]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-preprocess-")))
        place = prepare(folder, options.megabytes, options.workers)
        watched = len(GOALS.keys() & set(names)) * (len(place.corpora) - 1)
        advance = stack.enter_context(progress("runs", len(names) * (1 + options.repeats) + watched))
        tokens, rows = measure_preprocessing(place, names, options.repeats, advance)
    over = {row.name: ratios(rows, row.name) for row in rows if PLAIN in names}
    columns: dict[str, Callable[[Row], str]] = {
        "how": lambda row: row.name,
        "seconds": lambda row: mean_sd(row.seconds),
        "start-up": lambda row: f"{row.start:.2f}",
        "Mtokens/s": lambda row: f"{tokens / statistics.mean(row.seconds) / 1e6:.2f}",
        "× plain, and without start-up": lambda row: "{:.2f}, {:.2f}".format(*over[row.name]) if over else "–",
        "MB at " + " and ".join(f"{size:g}" for size in rows[-1].memory): lambda row: (
            ", ".join(f"{peak / 1e6:.0f}" for peak in row.memory.values()) or "–"
        ),
    }
    title = f"{options.megabytes:g} MB of text, {tokens / 1e6:.1f} M tokens, {options.workers} workers"
    speeds = {row.name: [tokens / seconds / 1e6 for seconds in row.seconds] for row in rows}
    return Answer(
        {
            "megabytes": options.megabytes,
            "workers": options.workers,
            "tokens": tokens,
            "seconds": {row.name: row.seconds for row in rows},
            "start_seconds": {row.name: row.start for row in rows},
            "ratios": over,
            "peak_memory_bytes": {row.name: row.memory for row in rows if row.memory},
        },
        table(f"{title}; mean ± standard deviation", rows, columns),
        [f"{why}: {name} is left out" for name, why in absent.items() if why] + _notes(rows),
        bars("million tokens per second, including start-up", speeds, ours=(SAME, FAST)),
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = ["all wrote the same .bin and .idx files, byte for byte"]
    for row in rows:
        if row.name in GOALS and rows[0].name == PLAIN:
            least = min(ratios(rows, row.name))
            reached = verdict(least >= GOALS[row.name])
            notes.append(f"{row.name}: {least:.2f} × (the lower of the two); goal {GOALS[row.name]:g} ×: {reached}")
        if row.name != PLAIN and len(row.memory) > 1:
            small, large = row.memory.values()
            flat = "flat" if large <= FLAT * small else "it grows"
            notes.append(f"{row.name}: peak memory {large / small:.2f} × that of the small corpus: {flat}")
    return notes
