"""``benchmarks faults``: runs killed with ``kill -9`` at random moments, which must resume as if nothing happened.

A run is started, killed, restarted with ``--resume`` and killed again, until it is complete or cannot resume. Then the
next run starts. A complete run must leave bit for bit the same as an uninterrupted run: metrics without their timings,
weights, optimizer, random states.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import multiprocessing.connection
import random
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contest import Answer, Columns, Flag, table
from benchmarks.trainees import TRAINEES, Outcome, Place, live
from rapidformer_templates.commands.bench.output import Advance, progress
from rapidformer_templates.errors import RapidformerError

FLAGS = (
    Flag("kills", 20, "kills per library"),
    Flag("seed", 0, "seed of the random moments", kind=int),
    Flag("peer", True, "also kill runs of transformers' Trainer"),
    Flag("folder", None, "folder of the runs (default: a temporary folder)"),
)

POLL_SECONDS = 0.0005


class Kill(NamedTuple):
    """A moment in the life of a process at which to kill it.

    Attributes:
        after: Seconds after the start of the process.
        into_save: Wait for the next save, and kill this many seconds into it. None does not wait.
    """

    after: float
    into_save: float | None = None


class Life(NamedTuple):
    """One process of a run.

    Attributes:
        seconds: Lifetime of the process.
        killed_in: State of the process when it was killed. None if it exited without a kill.
        status: Exit status if the process exited without a kill.
        saves: Duration of each save in seconds.
    """

    seconds: float
    killed_in: Place | None
    status: int | None
    saves: tuple[float, ...]


@dataclass
class FaultReport:
    """Results of the runs of one library.

    Attributes:
        name: Name of the library.
        kills: Number of kills by what the process was doing.
        stuck: For each run that could not resume without help, the last line of its last process.
        different: For each complete run that was not identical to the uninterrupted one, the first difference.
        complete: Number of complete runs.
    """

    name: str
    kills: Counter[Place] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    complete: int = 0

    @property
    def survived(self) -> int:
        """Number of kills after which the run resumed without help."""
        return self.kills.total() - len(self.stuck)

    @property
    def identical(self) -> int:
        """Number of complete runs that were bit for bit identical to the uninterrupted one."""
        return self.complete - len(self.different)

    @property
    def flawless(self) -> bool:
        return not self.stuck and not self.different

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kills": self.kills.total(),
            "kills_by_place": {place.name.lower(): self.kills[place] for place in Place},
            "survived": self.survived,
            "stuck": self.stuck,
            "complete_runs": self.complete,
            "identical_runs": self.identical,
            "different": self.different,
        }


def run_faults(
    kills: int, folder: Path, seed: int = 0, trainee: str = "ours", advance: Advance = lambda text: None
) -> FaultReport:
    """Kill runs until ``kills`` kills have happened, half of them during a save. Then let the last run finish.

    The folder keeps each run that went wrong, with its log.

    Raises:
        RapidformerError: Two uninterrupted runs differ, or one fails, so killed runs could not prove anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcome = TRAINEES[trainee].outcome
    report, moments = FaultReport(TRAINEES[trainee].name), Moments(seed, _references(trainee, folder))
    expected = outcome(folder / "uninterrupted-1")
    number = 0
    while report.kills.total() < kills:
        number += 1
        run = folder / f"run-{number}"
        if not _live_through(trainee, run, report, kills, moments, advance):
            report.stuck.append(f"{run.name}: {_last_words(run)}")
            continue
        report.complete += 1
        wrong = difference(expected, outcome(run))
        if wrong:
            report.different.append(f"{run.name}: {wrong}")
        else:
            shutil.rmtree(run)
    return report


def _references(trainee: str, folder: Path) -> Life:
    """Check that two uninterrupted runs agree. Return the process of the second one (the first one warms up)."""
    runs = [folder / f"uninterrupted-{i}" for i in (1, 2)]
    for run in runs:
        life = spend_life(trainee, run)
        if life.status != 0:
            raise RapidformerError(f"a run that nobody killed failed: {_last_words(run)}", where=f"{run}.log")
    wrong = difference(*(TRAINEES[trainee].outcome(run) for run in runs))
    if wrong:
        raise RapidformerError(f"two uninterrupted runs differ: {wrong}", where=str(folder))
    return life


class Moments:
    """Draws the moments of the kills uniformly over a whole life. Every second one is during a save."""

    def __init__(self, seed: int, uninterrupted: Life) -> None:
        self._draw = random.Random(seed)
        self._life = uninterrupted.seconds
        self._save = 1.2 * statistics.median(uninterrupted.saves)
        self._count = 0

    def next(self) -> Kill:
        self._count += 1
        into_save = self._draw.uniform(0, self._save) if self._count % 2 else None
        return Kill(self._draw.uniform(0, self._life), into_save)


def _live_through(trainee: str, run: Path, report: FaultReport, kills: int, moments: Moments, advance: Advance) -> bool:
    """Kill and resume one run until it is complete. Returns False if it could not resume."""
    while True:
        life = spend_life(trainee, run, moments.next() if report.kills.total() < kills else None)
        if life.killed_in is None:
            return life.status == 0
        report.kills[life.killed_in] += 1
        advance(f"{report.name}: {run.name}")


def spend_life(trainee: str, run: Path, kill: Kill | None = None) -> Life:
    """Start or restart the process of a run, and kill it at the given moment.

    The process is forked from a server that has imported everything, so it starts in one second instead of ten.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([live.__module__])
    place: Any = context.RawValue(ctypes.c_int, Place.START)
    process = context.Process(target=live, args=(trainee, str(run), place))
    process.start()
    began = time.perf_counter()
    saves: list[float] = []
    entered: float | None = None  # start of the current save
    while not multiprocessing.connection.wait([process.sentinel], POLL_SECONDS):
        now = time.perf_counter()
        if place.value == Place.SAVE:
            entered = entered or now
        elif entered is not None:
            saves.append(now - entered)
            entered = None
        if kill is None or now - began < kill.after:
            continue
        if kill.into_save is None or (entered is not None and now - entered >= kill.into_save):
            process.kill()
            break
    process.join()
    killed = process.exitcode == -9
    seconds = time.perf_counter() - began
    return Life(seconds, Place(place.value) if killed else None, None if killed else process.exitcode, tuple(saves))


def _last_words(run: Path) -> str:
    """Return the last line of the run's log, without the path of its folder."""
    lines = Path(f"{run}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].replace(f"{run}/", "") if lines else "no output"


def difference(expected: Outcome, actual: Outcome) -> str | None:
    """Describe the first difference between two outcomes."""
    for part, value in expected.items():
        other = actual.get(part, [])
        if len(value) != len(other):
            return f"{part} has {len(other)} entries instead of {len(value)}"
        for number, (wanted, found) in enumerate(zip(value, other, strict=True), start=1):
            if wanted != found:
                words = f"{found} instead of {wanted}" if isinstance(wanted, dict) else wanted[0]
                return f"{part}, entry {number}: {words}"
    return None


def answer(options: argparse.Namespace) -> Answer:
    trainees = ["ours", "transformers"] if options.peer else ["ours"]
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-faults-")))
        advance = stack.enter_context(progress("kills", options.kills * len(trainees)))
        reports = [run_faults(options.kills, folder / name, options.seed, name, advance) for name in trainees]
    rows = [report.to_json() for report in reports]
    places = zip(("at start", "in a step", "in a save", "at the end"), Place, strict=True)
    columns: Columns = {
        "library": "{name}",
        "kills": "{kills}",
        **{heading: f"{{kills_by_place[{place.name.lower()}]}}" for heading, place in places},
        "resumed": "{survived}",
        "runs": lambda row: str(row["complete_runs"] + len(row["stuck"])),
        "identical": "{identical_runs}",
    }
    return Answer(
        {"seed": options.seed, "solutions": rows},
        table("kill -9, then --resume", rows, columns),
        [line for report in reports for line in _notes(report)],
        status=0 if reports[0].flawless else 1,
    )


def _notes(report: FaultReport) -> list[str]:
    last_words = Counter(re.sub(r"\d+", "N", text.partition(": ")[2]) for text in report.stuck)
    return [
        f"{report.name}: {report.survived} of {report.kills.total()} kills survived without help, "
        f"{report.identical} of {report.complete} complete runs are identical to the uninterrupted one",
        *(f"  {count} × could not resume: {text}" for text, count in last_words.most_common()),
        *(f"  differs: {text}" for text in report.different[:5]),
    ]
