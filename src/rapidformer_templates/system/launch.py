"""Start local workers and tell their first error, once: what ``--nproc-per-node N`` does. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from rapidformer_templates.errors import ConfigError, Interrupted, RapidformerError, ReportedError, WorkerFailed
from rapidformer_templates.system.ports import free_port, why_not
from rapidformer_templates.system.processes import ERROR_FILE, Failure, Group
from rapidformer_templates.system.signals import asked_to_end

T = TypeVar("T")

CHECKED = "RAPIDFORMER_CHECKED"
"""Set for our own workers: the process that started them has checked the run and shown its plan."""

CHOSEN = "RAPIDFORMER_CHOSEN_LAYOUT"
"""Set for our own workers: the fields that the automatic strategy has chosen, as JSON."""

SEEN_AFTER = 5
"""Seconds within which peers of a killed worker have failed, too, and told so."""

TOLD = "told_at"
"""In a worker's error file: that :func:`report_errors` wrote it, and when."""

INTERRUPTED = "interrupted"
"""In a worker's error file: what an :class:`Interrupted` says."""


def is_worker() -> bool:
    """Whether torchrun or :func:`run_workers` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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

    SIGTERM, SIGINT and SIGHUP are passed on, and the workers get all the time they need to save; a second one
    ends them at once. When one worker fails the others are ended and the first error is raised, once. When this
    process is killed they save and end.

    Args:
        command: program and arguments.
        count: number of workers.
        port: where they meet; by default a free one.
        more: variables of their environment.
        resumes: whether there is a checkpoint to go on from.
        shown: what they print goes through ``sys.stdout`` and ``sys.stderr`` of this process, as a notebook needs it.

    Raises:
        ConfigError: nobody can meet on the port.
        Interrupted: the workers were asked to end.
        WorkerFailed: a worker failed; the text is that of the first error.
    """
    problem = port and why_not(port)
    if problem:
        raise ConfigError(problem, where="--master-port", hint="choose another, or leave it out for a free one")
    meeting_port = port or free_port()
    started = time.time()
    environments = [{**_environment(rank, count, meeting_port), **(more or {})} for rank in range(count)]
    with tempfile.TemporaryDirectory(prefix="rapidformer-") as folder, asked_to_end() as asked:
        workers = Group(command, environments, Path(folder), shown=shown)
        try:
            workers.wait(asked)
        finally:
            workers.kill()
        failures = workers.failures()
        if failures:
            _raise_first(failures, started, asked=bool(asked.signals), insisted=asked.insisted, resumes=resumes)


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


def _raise_first(
    failures: list[Failure],
    started: float,
    *,
    asked: bool,
    insisted: bool = False,
    resumes: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Raise what went wrong first; workers that failed because a peer was gone are not the cause.

    Args:
        failures: of all workers that failed.
        started: when they were started, s.
        asked: whether we were asked to end. If not, a worker that was asked to end may have been so by
            the launcher, because another one had failed.
        insisted: whether we were asked twice, and have killed the workers.
        resumes: whether there is a checkpoint to go on from.
    """
    told = [f.told[INTERRUPTED] for f in failures if INTERRUPTED in f.told]
    passed_on = [-signal.SIGTERM, -signal.SIGHUP] + ([-signal.SIGKILL] if insisted else [])
    ended = [Interrupted.SAVED, Interrupted.LOST] + (passed_on if asked else [])
    others = [f for f in failures if f.status not in ended]
    if not others or (asked and len(others) < len(failures)):
        if told:
            raise Interrupted(**told[0])
        if insisted:
            hint = "--resume goes on from the last checkpoint" if resumes() else "start it again"
            raise Interrupted("the workers were ended at once, as asked twice", hint=hint, saved=resumes())
        message = "asked to end before the first step; nothing was lost"
        raise Interrupted(message, hint="start it again", saved=resumes())
    first = min(others, key=_when)
    if TOLD in first.told:
        raise ReportedError(first.told["message"], first.status if first.status > 0 else 1, first.rank)
    memory = "out of memory is the usual cause of SIGKILL; " if first.status == -signal.SIGKILL else ""
    raise WorkerFailed(
        f"worker {first.rank} {first.how} after {time.time() - started:.0f} s; the others were ended",
        hint=f"{memory}--resume goes on from the last checkpoint",
    )


def _when(failure: Failure) -> float:
    """When a worker failed, s; a killed one is only seen some time after its peers lost it."""
    if TOLD in failure.told:
        return float(failure.told[TOLD])
    ended_by_us = failure.status == -signal.SIGTERM
    return math.inf if ended_by_us else failure.seen - SEEN_AFTER


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
        if path and Path(path).parent.exists():  # a launcher that was killed has nobody to read it
            record: dict[str, Any] = {"message": text, "timestamp": int(time.time()), TOLD: time.time()}
            if isinstance(error, Interrupted):
                record[INTERRUPTED] = {"message": error.message, "hint": error.hint, "saved": error.saved}
            Path(path).write_text(json.dumps(record), encoding="utf-8")
        else:
            print(text, file=sys.stderr)
        # Peers may be waiting for this process in a collective: do not wait for them in turn.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def report_uncaught() -> None:
    """From now on, tell an error that ends this worker as :func:`report_errors` does: nobody stands around its body."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        def again() -> NoReturn:
            raise error.with_traceback(trace)

        if isinstance(error, Exception):
            report_errors(again)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = tell
