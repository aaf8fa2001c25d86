"""Kill runs and resume them until they are complete, and compare them with runs that nobody has killed."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from benchmarks.contest import Advance
from benchmarks.trainees import Marks, Outcome, Place
from rapidformer_templates.errors import RapidformerError

KillT = TypeVar("KillT")


class Life(NamedTuple):
    """The processes of a run from one start to their end.

    Attributes:
        seconds: Lifetime of the first process.
        killed_in: State of the process when it was killed. None if the run ended without a kill.
        status: Exit status if it ended without a kill.
        saves: Duration of each save in seconds.
        start: Seconds until the first step.
        victim: The processes that were killed, if there are several.
        end: Seconds from the kill until all processes had ended.
        survivors: Number of processes that had to be killed later.
    """

    seconds: float
    killed_in: Place | None
    status: int | None
    saves: tuple[float, ...]
    start: float = 0.0
    victim: str = ""
    end: float = 0.0
    survivors: int = 0


class SaveClock:
    """Measures the saves of a process from outside.

    Attributes:
        start: Seconds until the first step. Infinite before it.
        saves: Seconds of each save.
        entered: Start of the current save. None outside of saves.
    """

    def __init__(self) -> None:
        self.start, self.saves = float("inf"), list[float]()
        self.entered: float | None = None

    def look(self, marks: Marks, now: float) -> None:
        if marks.stage == Place.STEP:
            self.start = min(self.start, now)
        if marks.saving:
            self.entered = self.entered or now
        elif self.entered is not None:
            self.saves.append(now - self.entered)
            self.entered = None


class Solution(Protocol[KillT]):
    """A library whose runs can be killed."""

    name: str

    def outcome(self, run: Path) -> Outcome:
        """Return what a complete run has left."""

    def moments(self, seed: int, uninterrupted: Life) -> Iterator[KillT]:
        """Yield the kills."""

    def spend_life(self, run: Path, kill: KillT | None = None) -> Life:
        """Start or resume a run, and kill it if it lives until the moment of the kill."""


@dataclass
class FaultReport:
    """Results of the runs of one library.

    Attributes:
        name: Name of the library.
        kills: Number of kills by what the process was doing.
        stuck: For each run that could not resume without help, the last line of its last process.
        different: For each complete run that was not identical to the uninterrupted one, the first difference.
        complete: Number of complete runs.
        victims: Number of kills by the processes that were killed.
        slowest_end: Longest time in seconds from a kill until all processes of the run had ended.
        slowest_kill: The run of this kill, what was killed, and what the watched process was doing.
        leftovers: Files that a complete run has left in its folder or the temporary folder, and a run that nobody has
            killed has not. Also processes that have not ended.
    """

    name: str
    kills: Counter[Place] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    complete: int = 0
    victims: Counter[str] = field(default_factory=Counter)
    slowest_end: float = 0.0
    slowest_kill: str = ""
    leftovers: list[str] = field(default_factory=list)

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
        return not self.stuck and not self.different and not self.leftovers

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
            "kills_by_victim": dict(self.victims),
            "slowest_end": self.slowest_end,
            "slowest_kill": self.slowest_kill,
            "leftovers": self.leftovers,
        }


def run_faults(
    solution: Solution[KillT], kills: int, folder: Path, seed: int = 0, advance: Advance = lambda text: None
) -> FaultReport:
    """Kill runs until ``kills`` kills have happened. Then let the last run finish.

    The folder keeps each run that went wrong, with its log.

    Raises:
        RapidformerError: Two uninterrupted runs differ, or one fails, so killed runs could not prove anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report, moments = FaultReport(solution.name), solution.moments(seed, _references(solution, folder))
    expected, files = solution.outcome(folder / "uninterrupted-1"), files_of(folder / "uninterrupted-1")
    number = 0
    while report.kills.total() < kills:
        number += 1
        run = folder / f"run-{number}"
        if not _live_through(solution, run, report, kills, moments, advance):
            report.stuck.append(f"{run.name}: {last_words(run)}")
            continue
        report.complete += 1
        report.leftovers += [f"{run.name}: {name}" for name in sorted(files_of(run) - files)]
        wrong = difference(expected, solution.outcome(run))
        if wrong:
            report.different.append(f"{run.name}: {wrong}")
        else:
            shutil.rmtree(run)
    return report


def files_of(run: Path) -> set[str]:
    """Return the names in the folder of a run and in its temporary folder, without finished checkpoints."""
    names = [f"/{path.relative_to(run)}" for path in run.rglob("*")]
    names += [f".tmp/{path.name}" for path in Path(f"{run}.tmp").iterdir()]
    return {name for name in names if not re.search(r"/(step|checkpoint)-\d+(/|$)", name)}


def _references(solution: Solution[KillT], folder: Path) -> Life:
    """Check that two uninterrupted runs agree. Return the life of the second one (the first one warms up)."""
    runs = [folder / f"uninterrupted-{i}" for i in (1, 2)]
    for run in runs:
        life = solution.spend_life(run)
        if life.status != 0:
            raise RapidformerError(f"a run that nobody killed failed: {last_words(run)}", where=f"{run}.log")
    wrong = difference(*(solution.outcome(run) for run in runs))
    if wrong:
        raise RapidformerError(f"two uninterrupted runs differ: {wrong}", where=str(folder))
    return life


def _live_through(
    solution: Solution[KillT], run: Path, report: FaultReport, kills: int, moments: Iterator[KillT], advance: Advance
) -> bool:
    """Kill and resume one run until it is complete. Returns False if it could not resume."""
    while True:
        life = solution.spend_life(run, next(moments) if report.kills.total() < kills else None)
        if life.killed_in is None:
            return life.status == 0
        report.kills[life.killed_in] += 1
        report.victims[life.victim] += 1
        if life.end > report.slowest_end:
            report.slowest_end = life.end
            report.slowest_kill = f"{run.name}: {life.victim or 'process'}, {life.killed_in.name.lower()}"
        if life.survivors:
            report.leftovers.append(f"{run.name}: {life.survivors} processes")
        advance(f"{report.name}: {run.name}")


def last_words(run: Path) -> str:
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
