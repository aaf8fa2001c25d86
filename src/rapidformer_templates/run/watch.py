"""Finds workers that make no progress, and names their rank, host, step, phase and line.

A thread of each worker publishes what the worker does in the group's key-value store, every second. If a worker needs
more than ``--worker-timeout`` seconds for a phase, its thread reads what the others have published, writes the stacks
and ends the process. This works during a collective as well, because torch releases the interpreter's lock there. A
worker that is stopped, or does not return from C code, is noticed because it no longer publishes anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from rapidformer_templates.errors import WorkerHangs
from rapidformer_templates.system.launch import line_of, report_errors
from rapidformer_templates.system.workers import Workers

SETUP, DATA, EXCHANGE, STEP = "setup", "loading data", "exchange of counts", "training step"
EVALUATION, SAVE, OWN_CODE, EXPORT = "evaluation", "save", "hooks and own code", "export"
PHASES = (SETUP, DATA, EXCHANGE, STEP, EVALUATION, SAVE, OWN_CODE, EXPORT)
"""The phases of a run, in the order in which a worker passes through them."""

PATIENCE = 3
"""Factor of the timeout for first steps, saves, exports and setup, and of the longest time that a phase has taken."""

SETUP_SECONDS = 1800
"""Minimum seconds for the setup, in which the first worker may download or preprocess data for all."""

BEAT = 1.0
"""Maximum seconds between two publications of a worker."""


@dataclass(frozen=True)
class Activity:
    """The activity of a worker.

    Attributes:
        beat: number of the publication.
        host: name of its machine.
        step: number of its optimizer step, from 1.
        phase: one of :data:`PHASES`.
        line: the line of the user's code that it runs, or of this package, with the name of the function.
        call: the function of ``torch.distributed`` that it waits in, or ``backward``. Empty if it runs other code.
        is_overdue: whether the phase takes longer than allowed.
    """

    beat: int
    host: str
    step: int
    phase: str
    line: str
    call: str
    is_overdue: bool

    @property
    def progress(self) -> tuple[int, int]:
        """A number that is smaller for a worker which the others wait for."""
        return self.step, PHASES.index(self.phase)

    def describe(self) -> str:
        call = f"in {self.call}, " if self.call else ""
        return f"{call}{self.line} (step {self.step}, {self.phase})"


class HangWatch:
    """Knows the phase of this worker, and watches all workers inside :meth:`running`."""

    def __init__(self) -> None:
        self._phase, self._step, self._since = SETUP, 0, time.monotonic()
        self._longest: dict[str, float] = defaultdict(float)
        self._ended = threading.Event()
        self._beat = 0

    def enter(self, phase: str, step: int) -> None:
        """Note that this worker begins a phase, or continues it, for example with the next batch of an evaluation.

        Args:
            step: number of the optimizer step that it belongs to or follows, from 1.
        """
        now = time.monotonic()
        self._longest[self._phase] = max(self._longest[self._phase], now - self._since)
        self._phase, self._step, self._since = phase, step, now

    @contextlib.contextmanager
    def running(
        self, workers: Workers, timeout: float, stacks: Path | None, resume_hint: Callable[[], str]
    ) -> Iterator[None]:
        """Watch this worker and its peers inside the context. A single worker is only reported, and continues.

        Args:
            timeout: seconds that a phase may take. 0 waits for ever.
            stacks: folder for the stacks of the workers. None writes them to standard error.
            resume_hint: returns what to do about a run that has ended.
        """
        if not timeout:
            yield
            return
        self._timeout, self._stacks, self._resume_hint = timeout, stacks, resume_hint
        self._workers, self._main = workers, threading.get_ident()
        # A separate connection. The one of the main thread is locked while that waits for a peer.
        self._store = workers.store.clone() if workers.store else None  # type: ignore[attr-defined]  # not in the stubs
        self._publish()  # so that the others know the host of a worker that stops early
        thread = threading.Thread(target=self._watch, daemon=True, name="watch workers")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(2 * BEAT)

    def _watch(self) -> None:
        is_reported = False
        with contextlib.suppress(dist.DistError):  # the worker that keeps the store has ended
            while not self._ended.wait(min(BEAT, self._timeout / 10)):
                status = self._publish()
                if self._store is not None and status.is_overdue:
                    self._judge()
                elif status.is_overdue and not is_reported:
                    seconds = time.monotonic() - self._since
                    print(f"no progress for {seconds:.0f} s: {status.describe()}", file=sys.stderr, flush=True)
                is_reported = status.is_overdue

    def _status(self) -> Activity:
        seconds, phase = time.monotonic() - self._since, self._phase
        is_long = phase in (SETUP, SAVE, OWN_CODE, EXPORT) or not self._longest[phase]
        allowed = max(self._timeout * (PATIENCE if is_long else 1), PATIENCE * self._longest[phase])
        if phase == SETUP:
            allowed = max(allowed, SETUP_SECONDS)
        line, call = _position(sys._current_frames()[self._main])
        return Activity(self._beat, socket.gethostname(), self._step, phase, line, call, seconds > allowed)

    def _publish(self) -> Activity:
        self._beat += 1
        status = self._status()
        if self._store is not None:
            self._store.set(f"watch/{self._workers.rank}", json.dumps(asdict(status)))
        return status

    def _judge(self) -> None:
        """End this worker if others do not respond, or if all of them have waited too long."""
        before = self._published()
        for _ in range(3 if before else 0):
            time.sleep(min(BEAT, self._timeout / 10))
            self._publish()
        after = self._published() if before else {}
        silent = [
            rank
            for rank in range(self._workers.world)
            if rank not in after or (rank in before and after[rank].beat == before[rank].beat)
        ]
        if not before:  # the first worker keeps the store
            silent = [0]
        own = self._status()
        # Several workers may download, preprocess or evaluate for hours, as long as nobody waits for them.
        someone_waits = any(status.phase not in (SETUP, OWN_CODE) for status in after.values())
        stuck = someone_waits and all(status.is_overdue for status in after.values())
        if self._ended.is_set() or not own.is_overdue or not (silent or stuck):
            return
        seconds = time.monotonic() - self._since
        self._write_stacks()
        time.sleep(2 * min(BEAT, self._timeout / 10))  # let the others write theirs: they end when this worker ends
        error = self._error(after or {self._workers.rank: own}, silent, seconds)
        report_errors(lambda: _raise(error))

    def _published(self) -> dict[int, Activity]:
        """Return the status of each worker that has published one. Empty if the store does not respond."""
        published: dict[int, Activity] = {}
        assert self._store is not None
        store, ranks = self._store, range(self._workers.world)

        def read() -> None:
            with contextlib.suppress(dist.DistError):
                for rank in ranks:
                    if store.check([f"watch/{rank}"]):
                        published[rank] = Activity(**json.loads(store.get(f"watch/{rank}")))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(2 * BEAT)
        return {} if reader.is_alive() else published

    def _error(self, statuses: dict[int, Activity], silent: list[int], seconds: float) -> WorkerHangs:
        first = min((status.progress for status in statuses.values()), default=(0, 0))
        behind = silent or [rank for rank, status in statuses.items() if status.progress == first]
        behind = [rank for rank in behind if rank in silent or not statuses[rank].call] or behind
        named = []
        for rank in behind[:4]:
            status = statuses.get(rank)
            host = f" on {status.host}" if status else ""
            if rank in silent:
                what, where = "does not respond (stopped or gone)", "; last seen: "
            else:
                what, where = "makes no progress", ": "
            named.append(f"worker {rank}{host} {what}" + (where + status.describe() if status else ""))
        waiting: dict[str, list[str]] = defaultdict(list)
        for rank, status in statuses.items():
            if rank not in behind:
                waiting[status.describe()].append(str(rank))
        others = [f"worker{'s' * (len(r) > 1)} {', '.join(r)} {what}" for what, r in waiting.items()]
        stacks = f"the stacks of the workers are in {self._stacks}; " if self._stacks else ""
        return WorkerHangs(
            f"no progress for {seconds:.0f} s: {'; '.join(named)}",
            where=f"the others: {'; '.join(others[:4])}" if others else None,
            hint=f"{stacks}{self._resume_hint()}; --worker-timeout (now {self._timeout:g} s) allows longer pauses",
        )

    def _write_stacks(self) -> None:
        if self._stacks is None:
            faulthandler.dump_traceback()
            return
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank-{self._workers.rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)


def _raise(error: WorkerHangs) -> None:
    raise error


def _position(frame: FrameType | None) -> tuple[str, str]:
    """Return the line of the user's or this package's code that a thread runs, and the collective that it waits in."""
    call, package = "", f"/{__name__.partition('.')[0]}/"
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        is_library = any(part in path for part in ("/site-packages/", "/dist-packages/", "/lib/python"))
        if package in path or not (is_library or path.startswith("<frozen")):
            return f"{line_of(frame)} in {name}", call
        if "/torch/distributed/" in path and name != "wrapper":
            call = call or name
        elif name == "_engine_run_backward":
            call = call or "backward"
        frame = frame.f_back
    return "", call
