"""``benchmarks faults`` and ``fault-table``: runs that are killed or broken, and must resume as if nothing happened.

``faults`` starts a run, kills it at a random moment, restarts it with ``--resume`` and kills it again, until it is
complete or cannot resume. Then the next run starts. ``fault-table`` provokes one fault in a run of several workers of
each engine. A complete run must leave bit for bit the same as an uninterrupted run: metrics without their timings,
weights, optimizer, random states.
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import random
import re
import resource
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.contest import Advance, Answer, Columns, Flag, Row, asks, progress, table
from benchmarks.killed import (
    ENGINES,
    OF_FOUR,
    Marks,
    Ours,
    Outcome,
    Place,
    Trainee,
    TransformersTrainer,
    difference,
    files_of,
    last_words,
    processes_of,
    start,
    wait_for_end,
)  # fmt: skip
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.trainer import Trainer

POLL_SECONDS = 0.0005

GROUP_STEPS, FAULT_STEP = 12, 7
"""Steps of a run with several workers, and the step after which a fault happens. It saves every 3 steps."""


class Victim(StrEnum):
    """The processes that a kill ends."""

    WORKER = "worker"
    LAUNCHER = "launcher"
    ALL = "all"


class Kill(NamedTuple):
    """A moment in the life of a run at which to kill some of its processes.

    Attributes:
        victim: The processes that it ends.
        worker: The worker that is killed, or whose state decides.
        place: State of this worker. None kills in any state.
        after: Seconds after the first step, or after the start if ``place`` is None.
        into: Seconds after the worker has reached this state.
    """

    victim: Victim
    worker: int
    place: Place | None
    after: float
    into: float = 0.0


class Life(NamedTuple):
    """The processes of a run from one start to their end.

    Attributes:
        seconds: Lifetime of the first process.
        killed_in: State of the watched worker when it was killed. None if the run ended without a kill.
        status: Exit status if it ended without a kill.
        saves: Duration of each save in seconds.
        first_step: Seconds until the first step.
        end: Seconds from the kill until all processes had ended.
        survivors: Number of processes that had to be killed later.
    """

    seconds: float
    killed_in: Place | None
    status: int | None
    saves: tuple[float, ...]
    first_step: float = 0.0
    end: float = 0.0
    survivors: int = 0


class Solution:
    """The runs of a library, which can be killed.

    Args:
        trainee: The job of the workers.
        workers: Number of workers.

    Attributes:
        has_struck: Whether the last kill has happened. Otherwise the run was complete before.
    """

    def __init__(self, trainee: Trainee, workers: int = 1) -> None:
        self.name, self.outcome = trainee.name, trainee.outcome
        self._trainee, self._workers = trainee, workers
        self.has_struck = False

    def moments(self, seed: int, uninterrupted: Life) -> Iterator[Kill]:
        """Yield kills: a third in saves, a third in exchanges, and of each third a third of each victim.

        If there is one process, half of the kills are in saves.
        """
        draw, save = random.Random(seed), 1.2 * statistics.median(uninterrupted.saves)
        alone = self._workers == 1
        places = (Place.SAVE, None) if alone else (Place.SAVE, Place.EXCHANGE, None)
        while True:
            for victim in [Victim.ALL] if alone else Victim:
                for place in places:
                    seconds = uninterrupted.seconds - (uninterrupted.first_step if place else 0)
                    into = save if place is Place.SAVE else 0.0
                    self.has_struck = False
                    while not self.has_struck:  # the run may be complete before
                        worker, after = draw.randrange(self._workers), draw.uniform(0, seconds)
                        yield Kill(victim, worker, place, after, draw.uniform(0, into))

    def spend_life(self, run: Path, kill: Kill | None = None) -> Life:
        """Start or resume a run, and kill it if it lives until the moment of the kill."""
        process, marks = start(self._trainee, run, self._workers)
        began, first_step, place = time.perf_counter(), float("inf"), None
        saves, entered = list[float](), 0.0
        while place is None and not multiprocessing.connection.wait([process.sentinel], POLL_SECONDS):
            now = time.perf_counter() - began
            if marks[0].stage == Place.STEP:
                first_step = min(first_step, now)
            if marks[0].saving:
                entered = entered or now
            elif entered:
                saves.append(now - entered)
                entered = 0.0
            if kill and now >= kill.after + (first_step if kill.place else 0):
                place = _strike(kill, marks[kill.worker], run, process.pid)
        seconds = time.perf_counter() - began
        survivors = wait_for_end(run)
        process.join()
        self.has_struck = place is not None
        status = None if self.has_struck else process.exitcode
        return Life(seconds, place, status, tuple(saves), first_step, time.perf_counter() - began - seconds, survivors)


def _strike(kill: Kill, watched: Marks, run: Path, launcher: int) -> Place | None:
    """Kill, and return the state of the watched worker at that time. None if it is in another state than planned.

    The worker is stopped in between, so that its state is certain.
    """
    if kill.place not in (None, watched.place) or (kill.victim is Victim.WORKER and not watched.pid):
        return None
    time.sleep(kill.into)
    pid = watched.pid
    try:
        if pid:
            os.kill(pid, signal.SIGSTOP)
        place = watched.place
        if kill.place in (None, place):
            victims = {Victim.WORKER: [pid], Victim.LAUNCHER: [launcher]}.get(kill.victim) or processes_of(run)
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            return place
        return None
    except ProcessLookupError:  # it has ended
        return None
    finally:
        if pid and Path(f"/proc/{pid}/fd/1").exists():  # a killed one has no files
            os.kill(pid, signal.SIGCONT)


@dataclass
class FaultReport:
    """Results of the runs of one library.

    Attributes:
        name: Name of the library.
        kills: Number of kills by the state of the watched process.
        stuck: For each run that could not resume without help, the last line of its last process.
        different: For each complete run that was not identical to the uninterrupted one, the first difference.
        complete: Number of complete runs.
        victims: Number of kills by the processes that were killed.
        slowest: Longest time in seconds from a kill until all processes of the run had ended. Also the run of this
            kill, the killed processes, and the state of the watched one.
        leftovers: Files that a complete run has left in its folder or the temporary folder, and a run that nobody has
            killed has not. Also processes that have not ended.
    """

    name: str
    kills: Counter[Place] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    complete: int = 0
    victims: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
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

    def to_json(self) -> Row:
        by_place = {place.name.lower(): self.kills[place] for place in Place}
        counts = {"kills": self.kills.total(), "kills_by_place": by_place, "kills_by_victim": dict(self.victims)}
        return vars(self) | counts | {"survived": self.survived, "identical": self.identical}


def run_faults(
    solution: Solution, kills: int, folder: Path, seed: int = 0, advance: Advance = lambda text: None
) -> FaultReport:
    """Kill runs until ``kills`` kills have happened. Then let the last run finish.

    The folder keeps each run that went wrong, with its log.

    Raises:
        RapidformerError: Two uninterrupted runs differ, or one fails, so killed runs could not prove anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = [folder / f"uninterrupted-{i}" for i in (1, 2)]  # the first one warms up
    for run in runs:
        life = solution.spend_life(run)
        if life.status != 0:
            raise RapidformerError(f"a run that nobody killed failed: {last_words(run)}", where=f"{run}.log")
    expected, files = solution.outcome(runs[0]), files_of(runs[0])
    if wrong := difference(expected, solution.outcome(runs[1])):
        raise RapidformerError(f"two uninterrupted runs differ: {wrong}", where=str(folder))
    report, moments, number = FaultReport(solution.name), solution.moments(seed, life), 0
    while report.kills.total() < kills:
        number += 1
        run = folder / f"run-{number}"
        while True:
            kill = next(moments) if report.kills.total() < kills else None
            life = solution.spend_life(run, kill)
            if kill is None or life.killed_in is None:
                break
            report.kills[life.killed_in] += 1
            report.victims[kill.victim] += 1
            slowest = life.end, f"{run.name}: {kill.victim}, {life.killed_in.name.lower()}"
            report.slowest = max(report.slowest, slowest)
            report.leftovers += [f"{run.name}: {life.survivors} processes"] if life.survivors else []
            advance(f"{report.name}: {run.name}")
        if life.status != 0:
            report.stuck.append(f"{run.name}: {last_words(run)}")
            continue
        report.complete += 1
        report.leftovers += [f"{run.name}: {name}" for name in sorted(files_of(run) - files)]
        if wrong := difference(expected, solution.outcome(run)):
            report.different.append(f"{run.name}: {wrong}")
        else:
            shutil.rmtree(run)
    return report


@asks(
    Flag("kills", 20, "kills per library"),
    Flag("seed", 0, "seed of the random moments", kind=int),
    Flag("peer", True, "also kill runs of transformers' Trainer"),
    Flag("workers", 1, "worker processes of each run"),
    Flag("engine", "ddp", "engine of several workers", choices=tuple(ENGINES)),
    Flag("async-save", False, "several workers save in the background"),
    Flag("folder", None, "folder of the runs (default: a temporary folder)"),
)
def faults(options: argparse.Namespace) -> Answer:
    """Kill runs. The status is 1 if a run of this library went wrong."""
    solutions = _solutions(options)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-faults-")))
        advance = stack.enter_context(progress("kills", options.kills * len(solutions)))
        reports = [
            run_faults(solution, options.kills, folder / str(number), options.seed, advance)
            for number, solution in enumerate(solutions)
        ]
    rows = [report.to_json() for report in reports]
    places = {
        "in a step": Place.STEP,
        "in a save": Place.SAVE,
        "in an exchange": Place.EXCHANGE,
        "at the end": Place.END,
    }
    columns: Columns = {
        "library": "{name}",
        "kills": "{kills}",
        "worker, launcher, all": lambda row: ", ".join(str(row["kills_by_victim"].get(victim, 0)) for victim in Victim),
        **{heading: f"{{kills_by_place[{place.name.lower()}]}}" for heading, place in places.items()},
        "resumed": "{survived}",
        "runs": lambda row: str(row["complete"] + len(row["stuck"])),
        "identical": "{identical}",
        "end": "{slowest[0]:.1f} s",
        "left": lambda row: str(len(row["leftovers"])),
    }
    return Answer(
        {"seed": options.seed, "workers": options.workers, "solutions": rows},
        table("kill -9, then --resume", rows, columns),
        [line for report in reports for line in _notes(report)],
        status=0 if reports[0].flawless else 1,
    )


def _solutions(options: argparse.Namespace) -> list[Solution]:
    """Return what is killed: this library, and transformers' Trainer.

    Raises:
        ConfigError: the engine needs another number of workers.
    """
    if options.workers == 1:
        return [Solution(Ours()), *([Solution(TransformersTrainer())] if options.peer else [])]
    if options.engine in OF_FOUR and options.workers % 4:
        raise ConfigError(f"{options.engine} needs 4 workers", where="--workers", hint="give --workers 4")
    flags = f"--nproc-per-node {options.workers} {ENGINES[options.engine]}" + " --async-save" * options.async_save
    name = options.engine + ", --async-save" * options.async_save
    trainees: list[Trainee] = [Ours(name, flags, GROUP_STEPS, _blocks(options.engine))]
    if options.peer:
        trainees.append(TransformersTrainer(f"{TransformersTrainer().name}, torchrun", GROUP_STEPS))
    return [Solution(trainee, options.workers) for trainee in trainees]


def _blocks(engine: str) -> int:
    return 4 if engine == "tensor-pipeline" else 2  # a pipeline needs more blocks than stages


def _notes(report: FaultReport) -> list[str]:
    words = Counter(re.sub(r"\d+", "N", text.partition(": ")[2]) for text in report.stuck)
    return [
        f"{report.name}: {report.survived} of {report.kills.total()} kills survived without help, "
        f"{report.identical} of {report.complete} complete runs are identical to the uninterrupted one",
        "  slowest end: {:.1f} s, {}".format(*report.slowest),
        *(f"  {count} × could not resume: {text}" for text, count in words.most_common()),
        *(f"  differs: {text}" for text in report.different[:5]),
        *(f"  left over: {text}" for text in report.leftovers[:5]),
    ]


# One fault in a run of several workers.

WORKER_TIMEOUT = 3
"""Seconds of ``--worker-timeout``."""

LONGEST = 300.0
"""Seconds after which a run that has not ended is killed."""


def flip_a_bit(job: Trainer) -> None:
    """Flip the lowest bit of a weight of a norm, which most layouts keep on several workers."""
    weight: Any = next(p for name, p in job.model.named_parameters() if name.endswith("ln_1.weight"))
    with torch.no_grad():
        # ZeRO-3 keeps its partition in an attribute.
        values = weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight).data
        values.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def leave_without_memory(job: Trainer) -> None:
    """Limit the memory of this process to what it has, and ask for more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    torch.ones(2**30)


def compute_nan(job: Trainer) -> None:
    """Let the last layer of this worker return NaN in all later steps."""
    (head,) = (module for name, module in job.model.named_modules() if name.endswith("lm_head"))
    head.register_forward_hook(lambda module, arguments, output: output * float("nan"))


class Samples(list[dict[str, torch.Tensor]]):
    """A data set that can stop answering."""

    is_blocked = False

    def __getitem__(self, index: Any) -> Any:
        if Samples.is_blocked:
            time.sleep(600)
        return super().__getitem__(index)


def block_data(job: Trainer) -> None:
    Samples.is_blocked = True


FAULTS: Mapping[str, Callable[[Trainer], object]] = {
    "a flipped bit in a weight": flip_a_bit,
    "SIGSTOP": lambda job: os.kill(os.getpid(), signal.SIGSTOP),
    "a hook that sleeps": lambda job: time.sleep(600),
    "a data set that blocks": block_data,
    "one collective too many": lambda job: dist.all_reduce(torch.zeros(1)),
    "sys.exit(0)": lambda job: sys.exit(0),
    "os._exit(0)": lambda job: os._exit(0),
    "sys.exit(0) in all workers": lambda job: sys.exit(0),
    "NaN in the loss": compute_nan,
    "memory exhausted": leave_without_memory,
    "kill -9 of a worker": lambda job: os.kill(os.getpid(), signal.SIGKILL),
    "kill -9 of the launcher": lambda job: os.kill(os.getppid(), signal.SIGKILL),
}
"""Faults by name. The last worker provokes one, or all workers do, after :data:`FAULT_STEP`."""


class Faulty(Ours):
    """A run with a fault.

    Args:
        fault: Name of the fault.
        worker: Rank of the worker that provokes it, if not all do.
        others: Arguments of :class:`Ours`.
    """

    def __init__(self, fault: str, worker: int, *others: Any) -> None:
        super().__init__(*others)
        self._fault, self._worker = fault, worker

    def mark_phases(self, marks: Marks) -> None:
        """Do not wrap the functions of the package: messages name the lines of waits."""

    def train_samples(self, samples: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        return Samples(samples)

    def step_done(self, job: Trainer, step: int, marks: Marks) -> None:
        is_here = self._fault.endswith("all workers") or os.environ["RANK"] == str(self._worker)
        if step == FAULT_STEP and is_here:
            marks.struck = time.monotonic()
            FAULTS[self._fault](job)


class Layout:
    """An engine with its workers, and its uninterrupted run.

    Raises:
        RapidformerError: The uninterrupted run fails.
    """

    def __init__(self, engine: str, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._workers = 4 if engine in OF_FOUR else 2
        flags = f"--nproc-per-node {self._workers} {ENGINES[engine]} --worker-timeout {WORKER_TIMEOUT}"
        self._job: tuple[Any, ...] = (engine, flags, GROUP_STEPS, _blocks(engine))
        folder.mkdir(parents=True, exist_ok=True)
        self._sound, run = Ours(*self._job), folder / "uninterrupted"
        if self._run(self._sound, run)[0] != 0:
            raise RapidformerError(f"the run without a fault failed: {last_words(run)}", where=f"{run}.log")
        self._expected: Outcome = self._sound.outcome(run)
        self._files = files_of(run)

    def provoke(self, fault: str) -> Row:
        """Run a job with a fault, and continue it without the fault.

        Returns:
            ``left`` and ``left_at_the_end``: the files that an uninterrupted run does not have, after the fault and
            after the resumed run. ``difference``: the first difference from the uninterrupted run.
        """
        run = self._folder / re.sub(r"\W+", "-", fault)
        status, seconds, survivors = self._run(Faulty(fault, self._workers - 1, *self._job), run)
        text = Path(f"{run}.log").read_text(encoding="utf-8", errors="replace")
        left = sorted(files_of(run) - self._files) + ["a process"] * survivors
        resumed = self._run(self._sound, run)[0] if status != 0 else 0
        wrong = difference(self._expected, self._sound.outcome(run)) if resumed == 0 else None
        left_at_the_end = sorted(files_of(run) - self._files)
        if resumed == 0 and not wrong:
            shutil.rmtree(run)
        return {
            "engine": self._engine,
            "fault": fault,
            "seconds": round(seconds, 1),
            "printed": first_error(text),
            "has_stack": "Traceback" in text or "Exception raised from" in text,
            "status": status,
            "left": left,
            "left_at_the_end": left_at_the_end,
            "resumed": resumed == 0,
            "difference": wrong,
        }

    def _run(self, job: Ours, run: Path) -> tuple[int | None, float, int]:
        """Run or continue a job until all of its processes have ended.

        Returns:
            The exit status of its launcher (a negative one is a signal, and None if it had to be killed), the seconds
            from the fault until all processes had ended, and the number of processes that had to be killed.
        """
        process, marks = start(job, run, self._workers)
        began = time.monotonic()
        process.join(LONGEST)
        status = process.exitcode
        if status is None:
            for pid in processes_of(run):
                os.kill(pid, signal.SIGKILL)
        survivors = wait_for_end(run)
        process.join()
        struck = min((mark.struck for mark in marks if mark.struck), default=began)
        return status, time.monotonic() - struck, survivors


def first_error(log: str) -> str:
    """Return the first error of a run and its place, or its last line. The name of this machine becomes ``node``."""
    lines = log.strip().replace(f" {socket.gethostname()}", " node").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(("error: ", "stopped"))]
    if not starts:
        return lines[-1] if lines else ""
    error, *more = lines[starts[0] :]
    where = [line.removeprefix("  where  ") for line in more[:1] if line.startswith("  where  ")]
    return "; ".join([error.removeprefix("error: "), *where])


@asks(
    Flag("engine", "all", "engine of the workers", choices=("all", *ENGINES)),
    Flag("fault", "all", "the fault, or the beginning of its name", kind=str),
    Flag("folder", None, "folder of the runs (default: a temporary folder)"),
)
def fault_table(options: argparse.Namespace) -> Answer:
    """Provoke faults. The status is 1 if a run did not continue like the uninterrupted one."""
    engines = list(ENGINES) if options.engine == "all" else [options.engine]
    names = [name for name in FAULTS if options.fault == "all" or name.startswith(options.fault)]
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-faults-")))
        advance = stack.enter_context(progress("faults", len(engines) * len(names)))
        for engine in engines:
            layout = Layout(engine, folder / engine)
            for fault in names:
                advance(f"{engine}: {fault}")
                rows.append(layout.provoke(fault))
    columns: Columns = {
        "engine": "{engine}",
        "fault": "{fault}",
        "printed": "{printed}",
        "status": "{status}",
        "ended after": "{seconds:.1f} s",
        "left": lambda row: ", ".join(row["left"]),
        "continued": lambda row: "no" if not row["resumed"] else row["difference"] or "identical",
    }
    failed = [row for row in rows if row["difference"] or not row["resumed"]]
    return Answer({"rows": rows}, table("one fault, then --resume", rows, columns, 3), [], status=int(bool(failed)))
