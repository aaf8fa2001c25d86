"""Kills of runs of several workers: one worker, the process that has started them, or all of them.

The launcher is forked from a process that has imported everything, and its workers are forked from it, so a run starts
in about two seconds. Everything else is as in ``--nproc-per-node``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main as torchrun

from benchmarks.killed_runs import Life, SaveClock
from benchmarks.trainees import BATCH, Marks, Ours, Outcome, Place, Trainee, prepare
from rapidformer_templates.errors import RapidformerError

ENGINES = {
    "ddp": "",
    "fsdp": "--fsdp-memory-optimization",
    "zero-2": "--zero-2-memory-optimization",
    "zero-3": "--zero-3-memory-optimization",
    "tensor-pipeline": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    f" --global-batch-size {2 * BATCH}",
}
"""The flags of each engine."""

PRELOADED = (
    Ours.__module__,
    "deepspeed",
    "rapidformer_templates.run.fit",
    "rapidformer_templates.switches.fsdp.engine",
    "rapidformer_templates.switches.layout.pipeline_engine",
    "rapidformer_templates.switches.zero.engine",
)
"""Modules that take seconds to import."""

POLL_SECONDS = 0.001

LONGEST_END = 60.0
"""Seconds after a kill in which all processes must end. Others are killed, and reported as leftovers."""


class Victim(StrEnum):
    """The processes that a kill ends."""

    WORKER = "worker"
    LAUNCHER = "launcher"
    ALL = "all"


class GroupKill(NamedTuple):
    """A moment in the life of several workers at which to kill some of them.

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


class Group:
    """Runs with several workers.

    Args:
        trainee: The job of the workers.
        workers: Number of workers.

    Attributes:
        has_struck: Whether the last kill has happened. Otherwise the run was complete before.
    """

    def __init__(self, trainee: Trainee, workers: int) -> None:
        self.name, self._trainee, self._workers = trainee.name, trainee, workers
        self.has_struck = False

    def outcome(self, run: Path) -> Outcome:
        return self._trainee.outcome(run)

    def moments(self, seed: int, uninterrupted: Life) -> Iterator[GroupKill]:
        """Yield kills: a third in saves, a third in exchanges, and of each third a third of each victim."""
        draw, save = random.Random(seed), 1.2 * statistics.median(uninterrupted.saves)
        while True:
            for victim in Victim:
                for place in (Place.SAVE, Place.EXCHANGE, None):
                    seconds = uninterrupted.seconds - (uninterrupted.start if place else 0)
                    into = save if place is Place.SAVE else 0.0
                    self.has_struck = False
                    while not self.has_struck:  # the run may be complete before
                        worker, after = draw.randrange(self._workers), draw.uniform(0, seconds)
                        yield GroupKill(victim, worker, place, after, draw.uniform(0, into))

    def spend_life(self, run: Path, kill: GroupKill | None = None) -> Life:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        marks: Any = context.RawArray(Marks, self._workers)
        process = context.Process(target=launch, args=(self._trainee, str(run), marks))
        process.start()
        began = time.perf_counter()
        clock, place = SaveClock(), None
        while place is None and not multiprocessing.connection.wait([process.sentinel], POLL_SECONDS):
            now = time.perf_counter() - began
            clock.look(marks[0], now)
            if kill and now >= kill.after + (clock.start if kill.place else 0):
                place = _strike(kill, marks[kill.worker], run, process.pid or 0)
        seconds = time.perf_counter() - began
        survivors = wait_for_end(run)
        process.join()
        self.has_struck = place is not None
        status = None if self.has_struck else process.exitcode
        end = time.perf_counter() - began - seconds
        victim = kill.victim if kill else ""
        return Life(seconds, place, status, tuple(clock.saves), clock.start, victim, end, survivors)


def _strike(kill: GroupKill, watched: Marks, run: Path, launcher: int) -> Place | None:
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


def processes_of(run: Path) -> list[int]:
    """Return the ids of the processes that write to the log of a run. A zombie has no files."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(output) == f"{run}.log":
                found.append(int(output.parts[2]))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def wait_for_end(run: Path) -> int:
    """Wait until all processes of a run have ended. Returns the number of those that had to be killed."""
    deadline = time.monotonic() + LONGEST_END
    while (remaining := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    return len(remaining)


def launch(trainee: Trainee, folder: str, marks: Sequence[Marks]) -> None:
    """Run the launcher in this process: ours or torchrun. Its ``subprocess.Popen`` forks the workers."""
    prepare(folder)

    class ForkedWorker(subprocess.Popen[bytes]):
        def _execute_child(self, *arguments: Any) -> None:
            environment: Mapping[str, str] = arguments[6] or {}
            if "RANK" not in environment or "RANK" in os.environ:  # another program, or started by a worker
                super()._execute_child(*arguments)  # type: ignore[misc]
                return
            self._child_created, self.pid = True, os.fork()
            if self.pid == 0:
                _work(trainee, folder, marks[int(environment["RANK"])], environment)

    sys.modules["__main__"] = sys.modules[__name__]  # a program that workers could run again
    for module in (subprocess, subprocess_handler):
        vars(module)["Popen"] = ForkedWorker
    if isinstance(trainee, Ours):
        try:
            trainee.live(Path(folder), Marks())
        except RapidformerError as error:  # as a script's main() does
            print(error.render(), file=sys.stderr)
            sys.exit(error.exit_status)
    else:
        torchrun(["--standalone", "--nproc-per-node", str(len(marks)), "script"])


def _work(trainee: Trainee, folder: str, marks: Marks, environment: Mapping[str, str]) -> NoReturn:
    """Run one worker in this process, which has none of the launcher's files, signal handlers and variables."""
    status = 1
    try:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        marks.pid = os.getpid()
        trainee.live(Path(folder), marks)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
