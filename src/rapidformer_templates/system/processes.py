"""Local worker processes that end together, and with the process that started them. Imports no torch.

Torch's launcher is not used for three reasons. It kills workers 30 seconds after a SIGTERM, but a checkpoint of a large
model takes longer. It does not support a second Ctrl-C. It handles signals that nohup ignores.
"""

from __future__ import annotations

import atexit
import codecs
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import Interrupted
from rapidformer_templates.system.signals import StopSignal

LAUNCHER = "RAPIDFORMER_LAUNCHER"
"""Set for our own workers: the process id of the process that started them."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set for each worker, also by torchrun: the file to which it reports its error."""

GRACE = 30.0
"""Seconds that a worker has to exit after a peer has failed or its launcher is gone."""

POLL = 0.05
"""Seconds between two checks of the workers."""


GLOO_THREADS = "pt_gloo_runloop"
LOOKS, BETWEEN, PATIENCE = 3, 0.002, 10.0
"""Number of checks in a row that find all of gloo's threads asleep, seconds between checks, and maximum seconds."""

Report = dict[str, Any]
"""The contents of a worker's error file, as JSON."""


@dataclass(frozen=True)
class Failure:
    """A worker that ended with a status other than 0.

    Attributes:
        rank: rank of the worker.
        status: its exit status. A negative one is the signal that killed it.
        noticed: time at which that was noticed, in seconds.
        report: contents of its error file.
    """

    rank: int
    status: int
    noticed: float
    report: Report = field(default_factory=dict)

    @property
    def describe_end(self) -> str:
        """How the worker ended, in words."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        return f"was killed by {signal.Signals(-self.status).name}"


class WorkerProcesses:
    """Processes of one command, one per worker, each in its own session.

    Args:
        command: program and arguments.
        environments: additional environment variables of each worker.
        folder: folder for their error files.
        shown: whether this process reads their output and prints it while it waits.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, *, shown: bool = False
    ) -> None:
        self._output = WorkerOutput(folder) if shown else None
        self._files = [folder / f"error-{rank}.json" for rank in range(len(environments))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._noticed: dict[int, float] = {}
        try:
            for environment, file in zip(environments, self._files, strict=True):
                variables = {LAUNCHER: str(os.getpid()), ERROR_FILE: str(file)}
                if self._output:
                    variables["PYTHONUNBUFFERED"] = "1"  # Python would buffer output to a file
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment, **variables},
                        start_new_session=True,
                        **(self._output.files if self._output else {}),
                    )
                )
        except OSError:  # not enough memory or process ids for one more process
            self.kill()
            raise

    def wait(self, stop: StopSignal) -> None:
        """Wait for all workers. Signals are passed on, and a repeated request kills the workers.

        If a worker fails, the others are asked to end, and killed after :data:`GRACE`. A worker that was asked to end
        and has saved is not a failure. The others then get the time that they need.
        """
        passed_on, deadline = 0, math.inf
        while self._running() and time.monotonic() < deadline + GRACE:  # killed processes may be stuck in the kernel
            for number in stop.signals[passed_on:]:
                if not passed_on:
                    print("stopping: the workers save first; press Ctrl-C again to stop at once", file=sys.stderr)
                # In a worker that is still importing, SIGINT would raise an exception anywhere, and all would report
                # it.
                self._send(signal.SIGTERM if number == signal.SIGINT else number)
                passed_on += 1
            ended = [p.returncode for p in self._processes if p.returncode]
            if ended and deadline == math.inf and any(status != Interrupted.SAVED for status in ended):
                self._send(signal.SIGTERM)
                deadline = time.monotonic() + GRACE
            if stop.is_repeated or time.monotonic() > deadline:
                self.kill()
            self._show()
            time.sleep(POLL)
        self._show()
        if self._output:
            self._output.close()
            self._output = None

    def _show(self) -> None:
        if self._output:
            self._output.show()

    def kill(self) -> None:
        """Kill the remaining workers, with the processes that they have started."""
        for process in self._running():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has already ended

    def failures(self) -> list[Failure]:
        """Return the workers that ended with a status other than 0."""
        self._running()
        statuses = [-signal.SIGKILL if p.returncode is None else p.returncode for p in self._processes]
        return [
            Failure(rank, status, self._noticed.get(rank, time.time()), _read(self._files[rank]))
            for rank, status in enumerate(statuses)
            if status
        ]

    def _running(self) -> list[subprocess.Popen[bytes]]:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self._noticed.setdefault(rank, time.time())
        return [process for process in self._processes if process.returncode is None]

    def _send(self, number: int) -> None:
        for process in self._running():
            process.send_signal(number)


class WorkerOutput:
    """The output of processes, in two files that this process keeps reading.

    Args:
        folder: folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        paths = (folder / "stdout", folder / "stderr")
        out, err = (path.open("ab") for path in paths)
        self.files: dict[str, Any] = {"stdout": out, "stderr": err}  # arguments for the Popen of such a process
        # The output so far may end in the middle of a character.
        self._readers = [(path.open("rb"), codecs.getincrementaldecoder("utf-8")(errors="replace")) for path in paths]

    def show(self) -> None:
        """Print the output since the last call."""
        for (reader, decoder), stream in zip(self._readers, (sys.stdout, sys.stderr), strict=True):
            if text := decoder.decode(reader.read()):
                stream.write(text)
                stream.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (*self.files.values(), *(reader for reader, _ in self._readers)):
            file.close()


def _read(file: Path) -> Report:
    try:
        report: Report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it wrote nothing, or was killed while writing
        return {}
    return report


@cache
def end_with_launcher(grace: float = GRACE) -> None:
    """End this worker if the process that started it is gone. It is asked to save and end, and then killed.

    Args:
        grace: seconds between the two, for hung workers that cannot save.
    """
    if LAUNCHER in os.environ:
        launcher = int(os.environ[LAUNCHER])
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()  # torchrun's agent
    else:
        return  # started by hand or by a scheduler, whose shell may exit first
    threading.Thread(target=_follow, args=(launcher, grace), daemon=True, name="end with launcher").start()


def _follow(launcher: int, grace: float) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)


@cache
def wait_at_exit() -> None:
    """Wait before the interpreter exits until gloo's threads have released what they have exchanged.

    A thread releases a tensor some time after the collective has completed, and needs the interpreter's lock for that.
    Before 3.14, CPython unwinds the stacks of threads that ask for the lock during finalization. C++ then calls abort,
    so SIGABRT would kill a worker whose run was successful. This happened when processes shared few cores, and a core
    dump showed the cause.
    """

    def wait_until_asleep() -> None:
        checks_asleep, end = 0, time.monotonic() + PATIENCE
        while checks_asleep < LOOKS and time.monotonic() < end:
            time.sleep(BETWEEN)  # release the lock, which a sleeping thread may be waiting for
            checks_asleep = 0 if any(state != "S" for state in _gloo_thread_states()) else checks_asleep + 1

    atexit.register(wait_until_asleep)


def _gloo_thread_states() -> list[str]:
    """Return the state of each of gloo's threads as the kernel reports it. Empty without such a file system."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended in the meantime
            continue
        if name == GLOO_THREADS:
            states.append(rest.split()[0])
    return states
