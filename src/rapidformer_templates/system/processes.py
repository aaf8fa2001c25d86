"""Requests to save and end (SIGTERM, SIGINT, SIGHUP), and local workers that end together. Imports no torch.

Workers also end with the process that started them. Torch's launcher is not used for three reasons. It kills workers 30
seconds after a SIGTERM, but a checkpoint of a large model takes longer. It does not support a second Ctrl-C. It handles
signals that nohup ignores.
"""

from __future__ import annotations

import atexit
import codecs
import faulthandler
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict, TypeVar

from rapidformer_templates.errors import Interrupted, WorkerFailed, WorkerHangs
from rapidformer_templates.planning.environment import launched

HandlerT = TypeVar("HandlerT", bound=Callable[[int, FrameType | None], None])

ASKING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals from a scheduler, from Ctrl-C, and from a terminal that is closed."""

INSISTS_AFTER = 1.0
"""Seconds. An earlier signal is the same request, sent to both the process and its group, or by shell and terminal."""


LAUNCHER = "RAPIDFORMER_LAUNCHER"
"""Set for our own workers: the process id of the process that started them."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set for each worker, also by torchrun: the file to which it reports its error."""

CRASH = ".crash"
"""Suffix of the file, in the same folder, for the stacks of a worker that crashes."""

GRACE = 30.0
"""Seconds that a worker has to exit after a peer has failed or its launcher is gone."""

HANG_GRACE = 2.0
"""Seconds that a worker has to exit after a peer has found that some do not respond, or has failed before they met."""

POLL = 0.05
"""Seconds between two checks of the workers."""

has_met = threading.Event()
"""Set once this worker has met the others. Before that it has nothing to save, and may wait in a connection."""

failed_at = math.inf
"""Time in seconds at which an error left :func:`joined`. When the process ends, its peers fail, too."""

GLOO_THREADS = "pt_gloo_runloop"
LOOKS, BETWEEN, PATIENCE = 3, 0.002, 10.0
"""Number of checks in a row that find all of gloo's threads asleep, seconds between checks, and maximum seconds."""


class StopSignal:
    """Records the signals that asked a process to end."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.is_repeated = False
        self._first = 0.0
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGHUP", None):
            for fd in self._terminals:  # writing to a closed terminal would raise an error
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), fd)
        now = time.monotonic()
        if not self.signals:
            self._first = now
        elif number in (signal.SIGTERM, signal.SIGINT) and now - self._first >= INSISTS_AFTER:
            self.is_repeated = True
        self.signals.append(number)


class StopRequest(StopSignal):
    """A request to end the run.

    Outside of the loop there is nothing left to save, so the request ends the run at once. Inside the loop a second
    request, such as a second Ctrl-C, means: do not wait for the save.

    Args:
        resumes: whether there is a checkpoint from which the same command would resume.
        alone: there is no launcher for this process, so a second request must end it here.
    """

    def __init__(self, resumes: Callable[[], bool] = lambda: False, *, alone: bool = True) -> None:
        super().__init__()
        self._resumes = resumes
        self._alone = alone
        self._in_loop = self._raised = False
        self._saves: bool | None = None  # after the loop: whether it has saved its work

    @property
    def is_requested(self) -> bool:
        return bool(self.signals)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        if self.is_repeated and self._alone:
            os.write(2, b"stopped at once, as requested twice\n")  # print is not safe here because it may be running
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._in_loop or self._raised:
            return
        self._raised = True  # only once, because a second exception would interrupt the cleanup
        if self._saves is None:
            message = "stopped before the first step; nothing was lost"
            raise Interrupted(message, hint="start it again", saved=self._resumes())
        message = "stopped after the last step, before evaluation and export were done"
        if self._saves:
            raise Interrupted(message, hint="every step is saved: --resume does the rest")
        raise Interrupted(message, hint="nothing was saved: there is no --save", saved=False)

    @contextmanager
    def loop(self, *, saves: bool) -> Iterator[StopRequest]:
        """Inside the context, store a request until the loop checks for it.

        Args:
            saves: whether the code inside leaves a checkpoint.
        """
        self._in_loop = True
        try:
            yield self
            self._saves = saves
        finally:
            self._in_loop = False


@contextmanager
def handle_stop_signals(handler: HandlerT) -> Iterator[HandlerT]:
    """Pass requests to end to ``handler`` inside the context. Only in the main thread, because Python requires it."""
    previous = {}
    try:
        for number in ASKING:
            if number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            previous[number] = signal.signal(number, handler)
    except ValueError:
        previous = {}  # not the main thread: the owner of the process handles its signals
    try:
        yield handler
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def interruptible(message: str, hint: str) -> Iterator[None]:
    """Raise :class:`Interrupted` inside the context on a request to end (in the main thread)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(message, hint=hint)

    with handle_stop_signals(interrupt):
        yield


class ErrorRecord(TypedDict, total=False):
    """The contents of a worker's error file, as JSON.

    ``told_at`` is the time at which the worker failed, ``lost_workers`` the attribute of the error, and ``interrupted``
    has the arguments of an :class:`Interrupted`.
    """

    message: str
    timestamp: int
    told_at: float
    lost_workers: int
    interrupted: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A worker that ended with a status other than 0, or too early.

    Attributes:
        rank: rank of the worker.
        status: its exit status. A negative one is the signal that killed it. 0 if it left the others at work.
        noticed: time at which that was noticed, in seconds. Infinite for a worker that the launcher has killed.
        report: contents of its error file.
        crash: the line of Python code that it ran when it crashed, if it could still write it.
    """

    rank: int
    status: int
    noticed: float
    report: ErrorRecord = field(default_factory=ErrorRecord)
    crash: str | None = None

    @property
    def is_loss(self) -> bool:
        """Whether the worker ended without an error to report and without a request, as if something had killed it."""
        return "told_at" not in self.report and self.noticed < math.inf and self.status != -signal.SIGTERM

    @property
    def describe_end(self) -> str:
        """How the worker ended, in words."""
        if self.status == 0:
            return "left the other workers with status 0, as by sys.exit(),"
        if self.status > 0:
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
                self._processes.append(self._started(command, environment, file))
        except OSError:  # not enough memory or process ids for one more process
            self.kill()
            raise

    def _started(self, command: Sequence[str], environment: Mapping[str, str], file: Path) -> subprocess.Popen[bytes]:
        variables = {LAUNCHER: str(os.getpid()), ERROR_FILE: str(file)}
        if self._output:
            variables["PYTHONUNBUFFERED"] = "1"  # Python would buffer output to a file
        return subprocess.Popen(
            command,
            env={**os.environ, **environment, **variables},
            start_new_session=True,
            stdout=self._output.stdout if self._output else None,
            stderr=self._output.stderr if self._output else None,
        )

    def wait(self, stop: StopSignal) -> None:
        """Wait for all workers. Signals are passed on, and a repeated request kills the workers.

        If a worker fails, the others are asked to end, and killed after :data:`GRACE`. If none has met the others, they
        have nothing to save and may wait in a connection, which no signal ends, so :data:`HANG_GRACE` is enough. A
        worker that was asked to end and has saved is not a failure. The others then get the time that they need.
        """
        passed_on, deadline, have_met = 0, math.inf, False
        while self._running() and time.monotonic() < deadline + GRACE:  # killed processes may be stuck in the kernel
            for number in stop.signals[passed_on:]:
                if not passed_on:
                    print("stopping: the workers save first; press Ctrl-C again to stop at once", file=sys.stderr)
                # In a worker that is still importing, SIGINT would raise an exception anywhere, and all would report
                # it.
                self._send(signal.SIGTERM if number == signal.SIGINT else number)
                passed_on += 1
            have_met = have_met or any(_joined_file(file).exists() for file in self._files)
            ended = self._failed().values()
            if deadline == math.inf and any(status != Interrupted.SAVED for status in ended):
                self._send(signal.SIGTERM)
                saves = have_met and WorkerHangs.exit_status not in ended
                deadline = time.monotonic() + (GRACE if saves else HANG_GRACE)
            if stop.is_repeated or time.monotonic() > deadline:
                self.kill()
            if self._output:
                self._output.show()
            time.sleep(POLL)
        if self._output:
            self._output.show()
            self._output.close()
            self._output = None

    def kill(self) -> None:
        """Kill the remaining workers, with the processes that they have started."""
        for process in self._running():
            self._noticed[self._processes.index(process)] = math.inf
            with suppress(ProcessLookupError):  # it has already ended
                os.killpg(process.pid, signal.SIGKILL)

    def failures(self) -> list[Failure]:
        """Return the workers that failed. A worker that still runs counts as killed."""
        running = {self._processes.index(process): -signal.SIGKILL for process in self._running()}
        return [
            Failure(
                rank,
                status,
                self._noticed.get(rank, time.time()),
                _read(self._files[rank]),
                _line_of_crash(self._files[rank].with_suffix(CRASH)),
            )
            for rank, status in sorted((self._failed() | running).items())
        ]

    def _failed(self) -> dict[int, int]:
        """Return the status of each worker that ended with another one than 0, or inside of :func:`joined`."""
        self._running()
        statuses = {rank: process.returncode for rank, process in enumerate(self._processes)}
        return {
            rank: status
            for rank, status in statuses.items()
            if status or (status == 0 and _joined_file(self._files[rank]).exists())
        }

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
        for path in paths:
            path.touch(0o600)
        self.stdout, self.stderr = (path.open("ab") for path in paths)
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
        for file in (self.stdout, self.stderr, *(reader for reader, _ in self._readers)):
            file.close()


def _joined_file(error_file: Path) -> Path:
    return error_file.with_suffix(".joined")


@contextmanager
def joined() -> Iterator[None]:
    """Let the launcher know that this worker and its peers wait for each other inside the context.

    If the process exits there, even with status 0, its peers would wait for it for ever.

    Raises:
        WorkerFailed: the code inside calls ``sys.exit()``.
    """
    global failed_at
    failed_at = math.inf
    error_file = Path(os.environ.get(ERROR_FILE, "")) if LAUNCHER in os.environ else None
    file = _joined_file(error_file) if error_file and error_file.parent.is_dir() else None
    if file:
        file.touch(0o600)
    try:
        yield
    except (Exception, Interrupted):
        failed_at = time.time()
        raise
    except SystemExit as error:
        failed_at = time.time()
        if launched() is None:
            raise
        caller = traceback.extract_tb(error.__traceback__)[-1]
        raise WorkerFailed(
            f"worker {os.environ['RANK']} has called sys.exit() before the run has ended",
            where=f"{Path(caller.filename).name}:{caller.lineno}",
            hint="call self.stop(), which ends the run on all workers, or raise an error",
        ) from None
    if file:
        file.unlink(missing_ok=True)


def _read(file: Path) -> ErrorRecord:
    try:
        report: ErrorRecord = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it wrote nothing, or was killed while writing
        return {}
    return report


@cache
def record_crashes() -> None:
    """Let a crash of this worker, such as an abort in C++ code, write the stacks of its threads for the launcher."""
    error_file = Path(os.environ.get(ERROR_FILE, ""))
    if LAUNCHER in os.environ and error_file.parent.is_dir() and not faulthandler.is_enabled():
        faulthandler.enable(os.open(error_file.with_suffix(CRASH), os.O_WRONLY | os.O_CREAT, 0o600))


def _line_of_crash(file: Path) -> str | None:
    """Return the line that a crashed worker ran, from the stacks of faulthandler: ``train.py:8 in on_step_end``.

    It is the newest line outside of other packages in the thread that crashed. If that was a thread without Python
    code, as those of gloo are, it is a line of the main thread, which comes last.
    """
    try:
        stacks = [text for text in file.read_text(encoding="utf-8").split("\n\n") if "  File " in text]
    except (OSError, ValueError):
        return None
    crashed = [stack for stack in stacks if stack.startswith("Current thread")] or stacks[-1:]
    for path, line, name in re.findall(r'  File "(.+)", line (\d+) in (.+)', "".join(crashed)):
        if is_own_code(path):
            return f"{Path(path).name}:{line} in {name}"
    return None


def is_own_code(path: str) -> bool:
    """Return whether a file belongs to this package or to the user, and not to Python or another package.

    Modules of this package that wrap the functions of others do not count. A wait there belongs to the caller.
    """
    if f"/{__name__.partition('.')[0]}/" in path:
        return not path.endswith(("/system/phase_clock.py", "/system/replaced_functions.py"))
    return not any(part in path for part in ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen"))


@cache
def end_with_launcher(grace: float = GRACE) -> None:
    """End this worker if the process that started it is gone. It is asked to save and end, and then killed.

    Args:
        grace: seconds between the two, for hung workers that cannot save. Before :data:`has_met` is set, there is
            nothing to save, and no signal ends a wait in a connection: it is :data:`HANG_GRACE`.
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
    time.sleep(min(grace, HANG_GRACE))
    if has_met.is_set():
        time.sleep(max(0.0, grace - HANG_GRACE))
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
            checks_asleep += 1
            for task in Path("/proc/self/task").glob("*/stat"):
                with suppress(OSError):  # it has ended in the meantime
                    name, _, state = task.read_text().partition("(")[2].rpartition(")")
                    if name == GLOO_THREADS and state.split()[0] != "S":
                        checks_asleep = 0

    atexit.register(wait_until_asleep)
