"""Runs of a table: workers in processes of their own that step only when it is their turn."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from rapidformer_templates.commands.bench import job as job_module
from rapidformer_templates.commands.bench.worker import Job

WARMUP = 2
"""First turns that do not count: allocations, receipts, buckets that are built anew."""

SILENCE_SECONDS = 600.0
"""Workers that say nothing for so long hang, and are ended."""

POLL_SECONDS = 0.1


@dataclass
class Run:
    """What one run measured.

    Attributes:
        seconds: of a step, in each turn after the warm-up, the slowest worker's.
        peaks: FLOP/s of a large matrix product around each of these turns; none if nobody measured it.
        figures: by rank: loss of the last step, ``peak_mb``, ``before_mb`` (without a model),
            ``setup_mb`` (until the first step), ``held`` (ours).
    """

    seconds: list[float] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    @property
    def peak_mb(self) -> float:
        """The greatest of the workers."""
        return max(float(worker["peak_mb"]) for worker in self.figures)


class CannotRun(Exception):
    """A run ended before its time; the text says why."""


class Contender:
    """A run that works only while it has its turn."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lines: dict[int, Connection] = {}
        self._pids: list[int] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(job.address)
        self._door.listen(job.workers)
        self._door.settimeout(POLL_SECONDS)
        self._process = subprocess.Popen(
            job_module.command(job), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def step(self) -> float:
        """Let it make a turn of steps; seconds a step of the slowest worker.

        Raises:
            CannotRun: it has failed, or hangs.
        """
        if not self._lines:
            self._let_in()
        for line in self._lines.values():
            with suppress(OSError):  # it is dead: listening tells
                line.send("go")
        return max(float(answer["seconds"]) for answer in self._answers("seconds"))

    def end(self) -> list[dict[str, Any]]:
        """What the workers tell after the last step, by rank; CannotRun as :meth:`step`."""
        return [answer["figures"] for answer in self._answers("figures")]

    def _let_in(self) -> None:
        until = time.monotonic() + SILENCE_SECONDS
        while len(self._lines) < self._job.workers:
            try:
                visitor, _ = self._door.accept()
            except TimeoutError:
                self._check(until)
                continue
            line = Connection(visitor.detach())
            hello = line.recv()
            self._lines[hello["rank"]] = line
            self._pids.append(hello["pid"])

    def _answers(self, kind: str) -> list[dict[str, Any]]:
        """One message of each worker, by rank."""
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + SILENCE_SECONDS
        while len(answers) < len(self._lines):
            waiting = {line: rank for rank, line in self._lines.items() if rank not in answers}
            for line in wait(list(waiting), POLL_SECONDS):
                assert isinstance(line, Connection)
                try:
                    answer = line.recv()
                except (EOFError, OSError):  # a worker is dead; the launcher says which and why
                    self._process.wait(SILENCE_SECONDS)
                    self._check(until)
                    raise CannotRun("a worker left before the end") from None
                if "absent" in answer:
                    raise CannotRun(answer["absent"])
                answers[waiting[line]] = answer
            self._check(until, finished=kind == "figures")
        return [answers[rank] for rank in sorted(answers)]

    def _check(self, until: float, *, finished: bool = False) -> None:
        """Raise if the run has failed or says nothing for too long."""
        if time.monotonic() > until:
            raise CannotRun(f"no word for {SILENCE_SECONDS:.0f} s: it hangs\n{self._last_words()}")
        if self._process.poll() is not None and not (finished and self._process.returncode == 0):
            raise CannotRun(self._last_words())

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().strip()
        if "out of memory" in text.lower():
            return "out of memory"
        return text[-1500:] or f"ended with status {self._process.returncode}"

    def close(self) -> None:
        """End whatever still runs of it."""
        for line in self._lines.values():
            line.close()
        with suppress(subprocess.TimeoutExpired):
            # A run that is complete, or whose workers see that their line is cut, ends by itself.
            self._process.wait(10)
        for pid in self._pids if self._process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._door.close()
        self._log.close()


def run_together(
    jobs: Sequence[Job], repeat: int, peak: Callable[[], float] | None = None
) -> tuple[dict[str, Run], dict[str, str]]:
    """Let runs step in turns, so that a busy moment of the machine hits all of them.

    Args:
        repeat: decides who begins.
        peak: measures what the machine can do now, FLOP/s; called before and after each turn.

    Returns:
        The runs, and why those that are not among them could not run; by :func:`name_of`.
    """
    runs, reasons = {name_of(job): Run() for job in jobs}, dict[str, str]()
    with ExitStack() as stack:
        contenders = {name_of(job): stack.enter_context(closing(Contender(job))) for job in jobs}
        for step in range(jobs[0].turns):
            # All have their warm-up before the first step that counts; then they begin in turns.
            names = list(contenders)
            for name in names if (step + repeat) % 2 else reversed(names):
                before = peak() if peak and step >= WARMUP else 0.0
                try:
                    seconds = contenders[name].step()
                except CannotRun as error:
                    reasons[name] = str(error)
                    contenders.pop(name).close()
                    continue
                if step >= WARMUP:
                    runs[name].seconds.append(seconds)
                    if peak:
                        runs[name].peaks.append((before + peak()) / 2)
        for name in list(contenders):
            try:
                runs[name].figures = contenders[name].end()
            except CannotRun as error:
                reasons[name] = str(error)
    return {name: run for name, run in runs.items() if name not in reasons}, reasons


def name_of(job: Job) -> str:
    """What a run is called: the solution, or the peer."""
    return job.peer or job.solution
