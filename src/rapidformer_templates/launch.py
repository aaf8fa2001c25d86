"""Start local workers and end all of them together: what ``--nproc-per-node N`` does.

Workers are the processes of torch's elastic launcher; its agent is left out, because it kills
workers 30 seconds after a SIGTERM, and a checkpoint of a large model takes longer than that.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from rapidformer_templates.errors import ConfigError, Interrupted, RapidformerError, ReportedError, WorkerFailed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

T = TypeVar("T")

CHECKED = "RAPIDFORMER_CHECKED"
"""Set for our own workers: the process that started them has checked the run and shown its plan."""

CHOSEN = "RAPIDFORMER_CHOSEN_LAYOUT"
"""Set for our own workers: the fields that the automatic strategy has chosen, as JSON."""

SEEN_AFTER = 5
"""Seconds within which peers of a killed worker have failed, too, and told so."""

TOLD = "told_at"
"""In a worker's error file: that :func:`report_errors` wrote it, and when."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's launcher for each worker


def is_worker() -> bool:
    """Whether torchrun or :func:`run_workers` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def this_command() -> list[str]:
    """The words that start this very program again.

    Raises:
        ConfigError: there is no program to start, in a notebook or an interactive session.
    """
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            "workers can only be started from a script or the command line",
            where="--nproc-per-node",
            hint="save the code as a script, or train with one worker here",
        )
    return [sys.executable, *sys.orig_argv[1:]]


def run_workers(
    command: Sequence[str], count: int, port: int | None = None, more: Mapping[str, str] | None = None
) -> None:
    """Run ``command`` in ``count`` local workers and wait for all of them.

    SIGTERM and SIGINT are passed on, and the workers get all the time they need to save. When one
    worker fails the others are ended and the first error is raised, once.

    Args:
        command: program and arguments.
        count: number of workers.
        port: where they meet; by default a free one.
        more: variables of their environment.

    Raises:
        ConfigError: the port is in use.
        Interrupted: the workers were asked to end and have saved.
        WorkerFailed: a worker failed; the text is that of the first error.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    from rapidformer_templates.workers import free_port, port_in_use

    if port is not None and port_in_use(port):
        raise ConfigError(
            f"port {port} is in use on this machine",
            where="--master-port",
            hint="choose another, or leave it out for a free one",
        )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we report the failure ourselves
    folder = tempfile.mkdtemp(prefix="rapidformer-")
    meeting_port = port or free_port()
    started = time.time()
    processes = start_processes(
        name="rapidformer",
        entrypoint=command[0],
        args={rank: tuple(command[1:]) for rank in range(count)},
        envs={rank: {**_environment(rank, count, meeting_port), **(more or {})} for rank in range(count)},
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    asked = False
    try:
        result = None
        while result is None:
            try:
                result = processes.wait(period=0.1)
            except SignalException as signalled:
                asked = True
                for pid in processes.pids().values():
                    _send(pid, signalled.sigval)
        if result.is_failed():
            _raise_first(list(result.failures.values()), started, asked=asked)
    finally:
        processes.close()
        shutil.rmtree(folder, ignore_errors=True)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // count)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        CHECKED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended by itself, and its result is about to be read


def _raise_first(failures: list[ProcessFailure], started: float, *, asked: bool) -> NoReturn:
    """Raise what went wrong first; workers that failed because a peer was gone are not the cause.

    Args:
        failures: of all workers that failed.
        started: when they were started, s.
        asked: whether we were asked to end. If not, a worker that was asked to end may have been so by
            the launcher, because another one had failed.
    """
    others = [f for f in failures if f.exitcode != Interrupted.exit_status]
    if not others or (asked and len(others) < len(failures)):
        raise Interrupted("the run was asked to end; it has saved a checkpoint", hint="go on with --resume")
    first = min(others, key=_when)
    if TOLD in first.error_file_data:
        raise ReportedError(first.error_file_data["message"], first.exitcode if first.exitcode > 0 else 1)
    how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"ended with status {first.exitcode}"
    raise WorkerFailed(
        f"worker {first.local_rank} {how} after {time.time() - started:.0f} s; the others were ended",
        hint="out of memory is the usual cause of SIGKILL; --resume goes on from the last checkpoint",
    )


def _when(failure: ProcessFailure) -> float:
    """When a worker failed, s; a killed one is only seen some time after its peers lost it."""
    if TOLD in failure.error_file_data:
        return float(failure.error_file_data[TOLD])
    ended_by_us = failure.exitcode == -signal.SIGTERM
    return math.inf if ended_by_us else failure.timestamp - SEEN_AFTER


def report_errors(body: Callable[[], T]) -> T:
    """Run a worker's body; on an error tell the launcher, or say it once on standard error, and exit.

    A user's mistake is shown without a stack trace, anything else with one.
    """
    try:
        return body()
    except Exception as error:
        if isinstance(error, RapidformerError):
            text, status = error.render(), error.exit_status
        else:
            text, status = traceback.format_exc().rstrip(), 1
        path = os.environ.get(ERROR_FILE)
        if path:
            record = {"message": text, "timestamp": int(time.time()), TOLD: time.time()}
            Path(path).write_text(json.dumps(record), encoding="utf-8")
        else:
            print(text, file=sys.stderr)
        # Peers may be waiting for this process in a collective: do not wait for them in turn.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
