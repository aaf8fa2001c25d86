"""``benchmarks faults``: runs killed with ``kill -9`` at random moments, which must resume as if nothing happened.

A run is started, killed, restarted with ``--resume`` and killed again, until it is complete or cannot resume. Then the
next run starts. A complete run must leave bit for bit the same as an uninterrupted run: metrics without their timings,
weights, optimizer, random states.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contest import Answer, Columns, Flag, asks, progress, table
from benchmarks.killed_runs import FaultReport, Life, SaveClock, Solution, run_faults
from benchmarks.trainees import TRAINEES, Marks, Ours, Outcome, Place, Trainee, TransformersTrainer, live
from benchmarks.worker_faults import ENGINES, Group, Victim
from rapidformer_templates.errors import ConfigError

FLAGS = (
    Flag("kills", 20, "kills per library"),
    Flag("seed", 0, "seed of the random moments", kind=int),
    Flag("peer", True, "also kill runs of transformers' Trainer"),
    Flag("workers", 1, "worker processes of each run"),
    Flag("engine", "ddp", "engine of several workers", choices=tuple(ENGINES)),
    Flag("async-save", False, "several workers save in the background"),
    Flag("folder", None, "folder of the runs (default: a temporary folder)"),
)

POLL_SECONDS = 0.0005

GROUP_STEPS = 12
"""Steps of a run with several workers."""

PLACES = {
    Place.START: "at start",
    Place.STEP: "in a step",
    Place.SAVE: "in a save",
    Place.END: "at the end",
}
"""Headings of the states of a single process."""

GROUP_COLUMNS: Columns = {
    **{victim: f"{{kills_by_victim[{victim}]}}" for victim in Victim},
    "saving": "{kills_by_place[save]}",
    "exchanging": "{kills_by_place[exchange]}",
}
"""Columns of several workers: the killed processes, and the state of the worker. Other kills were at any other time."""


class Kill(NamedTuple):
    """A moment in the life of a process at which to kill it.

    Attributes:
        after: Seconds after the start of the process.
        into_save: Wait for the next save, and kill this many seconds into it. None does not wait.
    """

    after: float
    into_save: float | None = None


class SingleProcess:
    """Runs of one process.

    Args:
        trainee: The job of the process.
    """

    def __init__(self, trainee: Trainee) -> None:
        self.name, self._trainee = trainee.name, trainee

    def outcome(self, run: Path) -> Outcome:
        return self._trainee.outcome(run)

    def moments(self, seed: int, uninterrupted: Life) -> Iterator[Kill]:
        """Yield kills uniformly over a whole life. Every second one is during a save."""
        draw, save = random.Random(seed), 1.2 * statistics.median(uninterrupted.saves)
        for number in count():
            into_save = None if number % 2 else draw.uniform(0, save)
            yield Kill(draw.uniform(0, uninterrupted.seconds), into_save)

    def spend_life(self, run: Path, kill: Kill | None = None) -> Life:
        """Start or restart the process of a run, and kill it at the given moment.

        The process is forked from a server that has imported everything, so it starts in one second instead of ten.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([live.__module__])
        marks: Any = context.RawValue(Marks)
        process = context.Process(target=live, args=(self._trainee, str(run), marks))
        process.start()
        began = time.perf_counter()
        clock = SaveClock()
        while not multiprocessing.connection.wait([process.sentinel], POLL_SECONDS):
            now = time.perf_counter() - began
            clock.look(marks, now)
            if kill is None or now < kill.after:
                continue
            if kill.into_save is None or (clock.entered is not None and now - clock.entered >= kill.into_save):
                process.kill()
                break
        process.join()
        killed = process.exitcode == -9
        seconds = time.perf_counter() - began
        return Life(seconds, marks.place if killed else None, None if killed else process.exitcode, tuple(clock.saves))


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    solutions = _solutions(options)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-faults-")))
        advance = stack.enter_context(progress("kills", options.kills * len(solutions)))
        reports = [
            run_faults(solution, options.kills, folder / str(number), options.seed, advance)
            for number, solution in enumerate(solutions)
        ]
    rows = [report.to_json() for report in reports]
    places = {heading: f"{{kills_by_place[{place.name.lower()}]}}" for place, heading in PLACES.items()}
    columns: Columns = {
        "library": "{name}",
        "kills": "{kills}",
        **(places if options.workers == 1 else GROUP_COLUMNS),
        "resumed": "{survived}",
        "runs": lambda row: str(row["complete_runs"] + len(row["stuck"])),
        "identical": "{identical_runs}",
        "end": "{slowest_end:.1f} s",
        "left": lambda row: str(len(row["leftovers"])),
    }
    return Answer(
        {"seed": options.seed, "workers": options.workers, "solutions": rows},
        table("kill -9, then --resume", rows, columns),
        [line for report in reports for line in _notes(report)],
        status=0 if reports[0].flawless else 1,
    )


def _solutions(options: argparse.Namespace) -> list[Solution[Any]]:
    """Return what is killed: this library, and transformers' Trainer.

    Raises:
        ConfigError: the engine needs another number of workers.
    """
    if options.workers == 1:
        return [SingleProcess(TRAINEES[name]) for name in (["ours", "transformers"] if options.peer else ["ours"])]
    if options.engine == "tensor-pipeline" and options.workers % 4:
        raise ConfigError("tensor-pipeline needs 4 workers", where="--workers", hint="give --workers 4")
    flags = f"--nproc-per-node {options.workers} {ENGINES[options.engine]}" + " --async-save" * options.async_save
    name = options.engine + ", --async-save" * options.async_save
    blocks = 4 if options.engine == "tensor-pipeline" else 2  # a pipeline needs more blocks than stages
    trainees: list[Trainee] = [Ours(name, flags, GROUP_STEPS, blocks)]
    if options.peer:
        trainees.append(TransformersTrainer(f"{TRAINEES['transformers'].name}, torchrun", GROUP_STEPS))
    return [Group(trainee, options.workers) for trainee in trainees]


def _notes(report: FaultReport) -> list[str]:
    last_words = Counter(re.sub(r"\d+", "N", text.partition(": ")[2]) for text in report.stuck)
    return [
        f"{report.name}: {report.survived} of {report.kills.total()} kills survived without help, "
        f"{report.identical} of {report.complete} complete runs are identical to the uninterrupted one",
        f"  slowest end: {report.slowest_end:.1f} s, {report.slowest_kill}",
        *(f"  {count} × could not resume: {text}" for text, count in last_words.most_common()),
        *(f"  differs: {text}" for text in report.different[:5]),
        *(f"  left over: {text}" for text in report.leftovers[:5]),
    ]
