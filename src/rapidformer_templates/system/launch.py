"""Starts this program again in local workers, and reports their first error once. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, TypeVar

from rapidformer_templates.errors import ConfigError, Explained, Interrupted, ReportedError, WorkerFailed
from rapidformer_templates.planning.environment import Launched, launched
from rapidformer_templates.system import processes
from rapidformer_templates.system.files import private_folder, write_private
from rapidformer_templates.system.processes import (
    ERROR_FILE,
    ErrorRecord,
    Failure,
    StopSignal,
    WorkerProcesses,
    handle_stop_signals,
)

T = TypeVar("T")

CHECKED = "RAPIDFORMER_CHECKED"
"""Set for our own workers: the process that started them has checked the run and shown its plan."""

CHOSEN = "RAPIDFORMER_CHOSEN_LAYOUT"
"""Set for our own workers: the fields that the automatic strategy has chosen, as JSON."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface of gloo. Without it, gloo uses that of the host's name."""

CPP_LOG = "TORCH_CPP_LOG_LEVEL"
"""Environment variable: torch's log level of C++ code. A warning about a lost connection prints 20 lines of frames."""

LOOPBACK = ("lo", "lo0")
"""Names of the interface that only this machine can reach, on Linux and on macOS."""

USUAL_CAUSES = {
    int(signal.SIGKILL): "out of memory is the usual cause of SIGKILL; ",
    int(signal.SIGABRT): "a library has printed the reason above, such as different collectives in two workers; ",
}
"""The beginning of the hint about a worker that a signal has ended."""

NOTICE_SECONDS = 5
"""Seconds within which the peers of a killed worker fail, too, and report it."""


def is_worker() -> bool:
    """Return whether torchrun or :func:`run_workers` started this process.

    Raises:
        ConfigError: see :func:`launched`.
    """
    return launched() is not None


def is_first_worker() -> bool:
    """Return whether this process is rank 0, or not a worker. It writes and prints for all."""
    return (launched() or Launched()).rank == 0


def run_workers(
    command: Sequence[str],
    count: int,
    port: int | None = None,
    more: Mapping[str, str] | None = None,
    resumes: Callable[[], bool] = lambda: False,
    *,
    shown: bool = False,
) -> None:
    """Run ``command`` in ``count`` local workers and wait for all of them.

    SIGTERM, SIGINT and SIGHUP are passed on, and the workers get all the time they need to save. A second signal ends
    them at once. If one worker fails, the others are ended and the first error is raised once. If this process is
    killed, the workers save and end.

    Args:
        command: program and arguments.
        count: number of workers.
        port: their rendezvous port. The default is a free one.
        more: additional environment variables.
        resumes: whether there is a checkpoint to resume from.
        shown: print their output through ``sys.stdout`` and ``sys.stderr`` of this process, as notebooks need.

    Raises:
        ConfigError: the port cannot be used.
        Interrupted: the workers were asked to end.
        WorkerFailed: a worker failed. The message comes from the first error.
    """
    if port:
        _check_port(port)
    started = time.time()
    with (
        private_folder() as folder,
        handle_stop_signals(StopSignal()) as stop,
        reserved_port() as free_port,
    ):
        environments = [{**_environment(rank, count, port or free_port), **(more or {})} for rank in range(count)]
        workers = WorkerProcesses(command, environments, folder, shown=shown)
        try:
            workers.wait(stop)
        finally:
            workers.kill()
        failures = workers.failures()
        if failures:
            raise_first_error(
                failures, started, is_requested=bool(stop.signals), is_repeated=stop.is_repeated, resumes=resumes
            )


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of this machine, which no other process is given inside the context.

    A socket that is bound but does not listen reserves the port. A worker can still listen on it, because both sockets
    set ``SO_REUSEADDR``.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _check_port(port: int) -> None:
    """Raise an error if this process cannot listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            is_reserved = isinstance(error, PermissionError)
            what = "reserved for the administrator of this machine" if is_reserved else "in use on this machine"
            hint = "choose another, or leave it out for a free one"
            raise ConfigError(f"port {port} is {what}", where="--master-port", hint=hint) from None


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // count)
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACK), "")
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        CHECKED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        INTERFACE: os.environ.get(INTERFACE, loopback),
        CPP_LOG: os.environ.get(CPP_LOG, "ERROR"),
    }


def raise_first_error(
    failures: list[Failure],
    started: float,
    *,
    is_requested: bool,
    is_repeated: bool = False,
    resumes: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Raise the first error. Workers that failed because a peer was gone are not the cause.

    Args:
        failures: all workers that failed.
        started: start time of the workers, in seconds.
        is_requested: whether this launcher was asked to end. If not, the launcher itself may have asked a worker to
            end, because another one had failed.
        is_repeated: whether the launcher was asked twice and has killed the workers.
        resumes: whether there is a checkpoint to resume from.
    """
    interruptions = [f.report["interrupted"] for f in failures if "interrupted" in f.report]
    passed_on = [-signal.SIGTERM, -signal.SIGHUP] + ([-signal.SIGKILL] if is_repeated else [])
    ended = [Interrupted.SAVED, Interrupted.LOST] + (passed_on if is_requested else [])
    others = [f for f in failures if f.status not in ended]
    saved = resumes()
    advice = "--resume continues from the last checkpoint" if saved else "start it again"
    if not others or (is_requested and len(others) < len(failures)):
        if interruptions:
            raise Interrupted(**interruptions[0])
        if is_repeated:
            message = "the workers were stopped at once, as requested twice"
            raise Interrupted(message, hint=advice, saved=saved)
        message = "stopped before the first step; nothing was lost"
        raise Interrupted(message, hint="start it again", saved=saved)
    first = min(others, key=_failure_time)
    if "told_at" in first.report:
        lost = 0 if is_requested else first.report.get("lost_workers", 0)
        raise ReportedError(first.report["message"], first.status if first.status > 0 else 1, first.rank, lost)
    raise WorkerFailed(
        f"worker {first.rank} {first.describe_end} after {time.time() - started:.0f} s; the others were stopped",
        where=first.crash,
        hint=USUAL_CAUSES.get(-first.status, "") + advice,
        lost_workers=0 if is_requested else max(1, sum(failure.is_loss for failure in others)),
    )


def _failure_time(failure: Failure) -> float:
    """Return the time of a failure in seconds. A killed worker is only noticed some time after its peers lost it."""
    if "told_at" in failure.report:
        return failure.report["told_at"]
    ended_by_us = failure.status == -signal.SIGTERM
    return math.inf if ended_by_us else failure.noticed - NOTICE_SECONDS


def report_errors(body: Callable[[], T]) -> T:
    """Run a worker's body. On an error, report it to the launcher or print it once on standard error, and exit.

    A user's mistake is shown without a stack trace, any other error with one.
    """
    try:
        return body()
    except (Exception, Interrupted) as error:
        report_error(error)


def report_error(error: BaseException) -> NoReturn:
    """Report a worker's error as :func:`report_errors` does, and exit. Any thread may call this."""
    lost = 0
    if isinstance(error, Explained):
        text, status, lost = str(error), error.exit_status, error.lost_workers
    else:
        text, status = "".join(traceback.format_exception(error)).rstrip(), 1
    path = os.environ.get(ERROR_FILE)
    if path and Path(path).parent.exists():  # if the launcher was killed, nobody reads the file
        failed = min(time.time(), processes.failed_at)
        report: ErrorRecord = {"message": text, "timestamp": int(failed), "told_at": failed, "lost_workers": lost}
        if isinstance(error, Interrupted):
            report["interrupted"] = {"message": error.message, "hint": error.hint, "saved": error.saved}
        write_private(Path(path), json.dumps(report).encode())
    else:
        print(text, file=sys.stderr)
    # Peers may be waiting for this process in a collective, so do not wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def report_uncaught() -> None:
    """Report errors that end this worker as :func:`report_errors` does, for workers whose body is not wrapped."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (Exception, Interrupted)):
            report_error(error.with_traceback(trace))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = tell


def show_mistakes_without_trace(argv: Sequence[str]) -> None:
    """Let a mistake that ends the running script show its message only, if the script has passed on its command line.

    This is for loops that users write. ``main()`` of a template does it, too, and sets the exit status.
    """
    if not is_script() or list(argv) != sys.argv[1:]:
        return
    show = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Explained):
            print(error, file=sys.stderr)
        else:
            show(kind, error, trace)

    sys.excepthook = tell


def is_script() -> bool:
    """Return whether a file or a module is run, instead of an interactive session, piped code or a notebook cell."""
    program = sys.modules["__main__"]
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        return False
    file = getattr(program, "__file__", None)  # "<stdin>" for a program on standard input
    return getattr(program, "__spec__", None) is not None or (file is not None and Path(file).is_file())


def line_of(frame: FrameType) -> str:
    """Return the location of a frame: ``train.py:8``, or ``In[3]:8`` for the third cell that a notebook has run."""
    shell = sys.modules.get("IPython")
    cell = shell.get_ipython() if shell is not None else None
    if cell is not None and frame.f_globals.get("__name__") == "__main__":
        return f"In[{cell.execution_count}]:{frame.f_lineno}"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def program_arguments() -> list[str]:
    """Return the command line of the program. Arguments of a notebook's kernel are not included."""
    piped_in = sys.argv[:1] in (["-"], ["-c"])  # Python's names for code without a file
    return sys.argv[1:] if is_script() or piped_in else []


def program_command() -> list[str]:
    """Return the command that starts this program again.

    Raises:
        ConfigError: there is no program to start, as in a notebook, an interactive session or on standard input.
    """
    if not is_script():
        raise ConfigError(
            "workers can only be started from a script or the command line",
            where="--nproc-per-node",
            hint="each worker runs the program again, but this one is not in a file: "
            "save the code as a script, or train with one worker here (nproc_per_node=1)",
        )
    return [sys.executable, *sys.orig_argv[1:]]


def interrupted_while_importing() -> NoReturn:
    """End a script with one line and no stack trace if Ctrl-C interrupted its imports, which take seconds.

    Raises:
        KeyboardInterrupt: at a prompt or in a notebook, which continues.
    """
    if not is_script():
        raise KeyboardInterrupt
    print("interrupted", file=sys.stderr)
    raise SystemExit(Interrupted.LOST)
