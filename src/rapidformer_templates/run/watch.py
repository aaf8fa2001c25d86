"""Finds workers that make no progress or are slow, and names their rank, host, step, phase and line.

A thread of each worker publishes what the worker does in the group's key-value store, every second. If a worker needs
more than ``--worker-timeout`` seconds for a phase, its thread reads what the others have published, writes the stacks
and ends the process. This works during a collective as well, because torch releases the interpreter's lock there. A
worker that is stopped, or does not return from C code, is noticed because it no longer publishes anything.

:class:`StragglerCheck` finds workers that are slower than their peers, so that all workers wait for them in every step.
Every :data:`PERIOD` steps the workers exchange how long they were busy in each phase of a typical step, the median. The
time in which a worker waits for others does not count, because in a synchronous step the fast workers wait as long as
the slow one computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rapidformer_templates.errors import WorkerHangs
from rapidformer_templates.run.performance import WARMUP
from rapidformer_templates.system import phase_clock
from rapidformer_templates.system.launch import line_of, report_error
from rapidformer_templates.system.phase_clock import PhaseClock
from rapidformer_templates.system.processes import is_own_code
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers

SETUP, DATA, EXCHANGE, STEP = "setup", "loading data", "exchange of counts", "training step"
EVALUATION, CHECK, SAVE = "evaluation", "comparison of replicas", "save"
OWN_CODE, EXPORT = "hooks and own code", "export"
PHASES = (SETUP, DATA, EXCHANGE, STEP, EVALUATION, CHECK, SAVE, OWN_CODE, EXPORT)
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
        calls: see :class:`HangWatch`.
    """

    beat: int
    host: str
    step: int
    phase: str
    line: str
    call: str
    is_overdue: bool
    calls: int

    @property
    def progress(self) -> tuple[int, int, int]:
        """Calls, step and place of the phase in it. The worker that the others wait for has the smallest value."""
        return self.calls, self.step, PHASES.index(self.phase)

    def describe(self) -> str:
        call = f"in {self.call}, " if self.call else ""
        return f"{call}{self.line} (step {self.step}, {self.phase})"


class HangWatch:
    """Knows the phase of this worker, and watches all workers inside :meth:`running`.

    Args:
        clock: measures the phases.

    Attributes:
        calls: number of calls of a session so far. Its phases have no order of their own, but all workers make the same
            calls. 0 in the library's loop.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self.calls = 0
        self.phase, self.step, self.since = SETUP, 0, time.monotonic()
        self.longest: dict[str, float] = defaultdict(float)
        """The longest time of each phase so far, in seconds."""

    def enter(self, phase: str, step: int) -> None:
        """Note that this worker begins a phase, or continues it, for example with the next batch of an evaluation.

        Args:
            step: number of the optimizer step that it belongs to or follows, from 1.
        """
        now = time.monotonic()
        self.longest[self.phase] = max(self.longest[self.phase], now - self.since)
        self.phase, self.step, self.since = phase, step, now
        self._clock.enter(phase)

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
        watcher = _Watcher(self, workers, timeout, stacks, resume_hint)
        watcher.publish()  # so that the others know the host of a worker that stops early
        thread = threading.Thread(target=watcher.watch, daemon=True, name="watch workers")
        thread.start()
        try:
            yield
            workers.barrier()  # the last hook of a worker may take longer than those of others
        finally:
            watcher.ended.set()
            thread.join(2 * BEAT)
        workers.barrier()  # the worker that keeps the store must not end while others publish


class _Watcher:
    """The thread of a worker that watches it and its peers. The main thread creates it."""

    def __init__(
        self, own: HangWatch, workers: Workers, timeout: float, stacks: Path | None, resume_hint: Callable[[], str]
    ) -> None:
        self._own, self._workers, self._timeout = own, workers, timeout
        self._stacks, self._resume_hint = stacks, resume_hint
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._beat, self._pause = 0, min(BEAT, timeout / 10)
        self.ended = threading.Event()
        # A separate connection. The one of the main thread is locked while that waits for a peer.
        self._store = workers.store.clone() if workers.store else None  # type: ignore[attr-defined]  # not in the stubs

    def watch(self) -> None:
        """Publish what this worker does until the run has ended, and end it if a worker hangs."""
        is_reported = False
        with contextlib.suppress(dist.DistError):  # the worker that keeps the store has ended
            while not self.ended.wait(self._pause):
                activity = self.publish()
                if self._store is not None and activity.is_overdue:
                    self._judge(self._store)
                elif activity.is_overdue and not is_reported:
                    line = f"no progress for {self._seconds_in_phase:.0f} s: {activity.describe()}"
                    print(line, file=sys.stderr, flush=True)
                is_reported = activity.is_overdue

    @property
    def _seconds_in_phase(self) -> float:
        return time.monotonic() - self._own.since

    def publish(self) -> Activity:
        """Let the others know what this worker does."""
        self._beat += 1
        activity = self._activity()
        if self._store is not None:
            self._store.set(f"watch/{self._workers.rank}", json.dumps(asdict(activity)))
        return activity

    def _activity(self) -> Activity:
        phase, longest = self._own.phase, self._own.longest[self._own.phase]
        is_long = phase in (SETUP, SAVE, OWN_CODE, EXPORT) or not longest
        allowed = max(self._timeout * (PATIENCE if is_long else 1), PATIENCE * longest)
        if phase == SETUP:
            allowed = max(allowed, SETUP_SECONDS)
        line, call = _position(sys._current_frames()[self._main])
        is_overdue = self._seconds_in_phase > allowed
        return Activity(self._beat, self._host, self._own.step, phase, line, call, is_overdue, self._own.calls)

    def _judge(self, store: Store) -> None:
        """End this worker if others do not respond, or if all of them have waited too long."""
        before = self._published(store)
        for _ in range(3 if before else 0):
            time.sleep(self._pause)
            self.publish()
        own = self._activity()
        if before:
            after, ranks = self._published(store), range(self._workers.world)
            silent = [r for r in ranks if r not in after or (r in before and after[r].beat == before[r].beat)]
        else:  # the first worker keeps the store
            after, silent = {self._workers.rank: own}, [0]
        # Several workers may download, preprocess or evaluate for hours, as long as nobody waits for them.
        someone_waits = any(each.phase not in (SETUP, OWN_CODE) for each in after.values())
        stuck = someone_waits and all(each.is_overdue for each in after.values())
        if self.ended.is_set() or not own.is_overdue or not (silent or stuck):
            return
        seconds = self._seconds_in_phase
        if self._stacks is None:
            faulthandler.dump_traceback()
        else:
            self._stacks.mkdir(parents=True, exist_ok=True)
            with (self._stacks / f"rank-{self._workers.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
        time.sleep(2 * self._pause)  # let the others write theirs: they end when this worker ends
        report_error(self._error(after, silent, seconds))

    def _published(self, store: Store) -> dict[int, Activity]:
        """Return the activity of each worker that has published one.

        Empty if the worker that keeps the store is gone, or does not respond for a quarter of ``--worker-timeout``. A
        busy store is slow: every worker may ask it at the same time.
        """
        published: dict[int, Activity] = {}

        def read() -> None:
            with contextlib.suppress(dist.DistError):
                keys = _existing(store, [f"watch/{rank}" for rank in range(self._workers.world)])
                for key, value in zip(keys, store.multi_get(keys) if keys else (), strict=True):
                    published[int(key.removeprefix("watch/"))] = Activity(**json.loads(value))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(max(2 * BEAT, self._timeout / 4))
        return {} if reader.is_alive() else published

    def _error(self, statuses: dict[int, Activity], silent: list[int], seconds: float) -> WorkerHangs:
        first = min((status.progress for status in statuses.values()), default=(0, 0, 0))
        behind = silent or [rank for rank, status in statuses.items() if status.progress == first]
        behind = [rank for rank in behind if rank in silent or not statuses[rank].call] or behind
        named = []
        for rank in behind[:4]:
            status = statuses.get(rank)
            # Worker 0 keeps the store, so nothing is known about it if it is gone.
            host = f" on {status.host}" if status else "" if rank else f" at {os.environ['MASTER_ADDR']}"
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


def _existing(store: Store, keys: list[str]) -> list[str]:
    """Return the keys that the store has, with a single request if it has all of them."""
    if store.check(keys):
        return keys
    middle = len(keys) // 2
    return _existing(store, keys[:middle]) + _existing(store, keys[middle:]) if middle else []


def _position(frame: FrameType | None) -> tuple[str, str]:
    """Return the line of the user's or this package's code that a thread runs, and the collective that it waits in."""
    call = ""
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if is_own_code(path):
            return f"{line_of(frame)} in {name}", call
        if "/torch/distributed/" in path and name != "wrapper":
            call = call or name
        elif name == "_engine_run_backward":
            call = call or "backward"
        frame = frame.f_back
    return "", call


PERIOD = 50
"""Number of steps over which workers are compared."""

LOGGING = "logging"

COMPARED = (DATA, STEP, phase_clock.FORWARD, phase_clock.BACKWARD, phase_clock.UPDATE, OWN_CODE, LOGGING)
"""The phases that are compared. Evaluations, saves and exports are not: the first worker has more to do there."""

MINIMUM_LOSS = 0.1
"""Minimum fraction of a step that the others must lose. Below that it does not matter who is slow."""


StragglerSummary = dict[str, Any]
"""A straggler in ``summary.json``: its ``rank``, ``host``, slowest ``phase`` and highest ``slowdown``.

``reports`` is the number of periods in which it was slow, ``first_step`` and ``last_step`` are their first and last
step. The times ``step_ms`` and ``peers_ms`` belong to the last report.
"""


def find_stragglers(
    times: Sequence[Sequence[float]], stages: Sequence[int], factor: float
) -> Iterator[tuple[int, str, list[float], list[float]]]:
    """Find the workers that are busy for at least ``factor`` times as long as the median of their peers.

    Args:
        times: the milliseconds of each worker in a typical step, by rank: busy in all of :data:`COMPARED`, in each of
            them, and waiting for others or exchanging tensors with them.
        stages: the pipeline stage of each worker. Only workers of the same stage do the same work.

    Yields:
        The rank, the phase in which it loses most, and its milliseconds in all phases and in that one, with the same of
        its peers.
    """
    for rank, own in enumerate(times):
        peers = [times[peer] for peer, stage in enumerate(stages) if stage == stages[rank] and peer != rank]
        usual = [statistics.median(phase) for phase in zip(*peers, strict=True)]
        if not peers or own[0] < factor * usual[0] or own[0] - usual[0] < MINIMUM_LOSS * (own[0] + own[-1]):
            continue
        slowest = max(range(1, len(COMPARED) + 1), key=lambda phase: own[phase] - usual[phase])
        yield rank, COMPARED[slowest - 1], [own[0], own[slowest]], [usual[0], usual[slowest]]


@dataclass
class StragglerCheck:
    """Compares the workers of a run every :data:`PERIOD` steps, after the first few steps of this process.

    Attributes:
        factor: the slowdown that is reported. 0 compares nothing.
    """

    workers: Workers
    factor: float
    _steps: int = field(init=False, default=0)
    _seconds: list[tuple[float, ...]] = field(init=False, default_factory=list)
    """For each step of this period: in all :data:`COMPARED`, in each of them, and waiting."""
    _found: dict[int, StragglerSummary] = field(init=False, default_factory=dict)
    _unlogged: dict[str, float] = field(init=False, default_factory=dict)

    def step_done(self, step: int) -> None:
        """Count a step, and compare the workers if a period ends. Call it on every rank.

        Args:
            step: number of the step, from 1.
        """
        if not self.factor or self.workers.world == 1:
            return
        busy, waiting = self.workers.clock.take()
        self._steps += 1
        if self._steps <= WARMUP:
            return
        phases = [busy.get(phase, 0.0) for phase in COMPARED]
        exchanging = busy.get(EXCHANGE, 0.0) + busy.get(phase_clock.EXCHANGE, 0.0) + sum(waiting.values())
        self._seconds.append((sum(phases), *phases, exchanging))
        if len(self._seconds) < PERIOD:
            return
        typical = map(statistics.median, zip(*self._seconds, strict=True))
        self._seconds.clear()
        times = (self.workers.gather_numbers(*typical) * 1000).tolist()
        per_stage = self.workers.world // self.workers.pipeline
        stages = [rank // per_stage for rank in range(self.workers.world)]
        stragglers = list(find_stragglers(times, stages, self.factor))
        hosts = self.workers.gather(socket.gethostname()) if stragglers else []
        for rank, phase, own, peers in stragglers:
            first, slowdown = step - PERIOD + 1, round(own[0] / max(peers[0], 1e-6), 2)
            line = f"steps {first:,} to {step:,}: worker {rank} on {hosts[rank]} is slow: {own[0]:,.1f} ms per step "
            line += f"without the exchanges, its peers {peers[0]:,.1f} ms; it loses most in {phase}: {own[1]:,.1f} ms"
            say(self.workers, f"{line}, its peers {peers[1]:,.1f} ms", loud=True)
            before = self._found.get(rank, {"slowdown": 0.0, "first_step": first, "reports": 0})
            self._found[rank] = {
                **before,
                "rank": rank,
                "host": hosts[rank],
                "phase": phase,
                "slowdown": max(slowdown, before["slowdown"]),
                "step_ms": round(own[0], 3),
                "peers_ms": round(peers[0], 3),
                "last_step": step,
                "reports": before["reports"] + 1,
            }
            if slowdown > self._unlogged.get("straggler_slowdown", 0.0):
                self._unlogged = {"straggler": rank, "straggler_slowdown": slowdown}

    def logged_values(self) -> dict[str, float]:
        """Return the rank and the slowdown of the slowest worker since the last call, if one was reported."""
        values, self._unlogged = self._unlogged, {}
        return values

    def summary(self) -> list[StragglerSummary]:
        """Return the stragglers of this process's steps, those with most reports first."""
        return sorted(self._found.values(), key=lambda one: (-one["reports"], one["rank"]))
