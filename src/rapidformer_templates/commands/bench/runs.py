"""Runs of a table: separate worker processes that make steps only when it is their turn."""

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

from rapidformer_templates.commands.bench import job as job_module
from rapidformer_templates.commands.bench.worker import BenchJob, Figures, Message

WARMUP = 2
"""First turns that do not count, because of allocations, receipts and rebuilt buckets."""

SILENCE_SECONDS = 600.0
"""Workers that send nothing for this time are treated as hanging and are stopped."""

POLL_SECONDS = 0.1


@dataclass
class MeasuredRun:
    """The measurements of one run.

    Attributes:
        seconds: seconds per step of the slowest worker, for each turn after the warm-up.
        peaks: FLOP/s of a large matrix product around each of these turns. Empty if it was not measured.
        figures: the figures of each worker, by rank.
    """

    seconds: list[float] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    @property
    def peak_mb(self) -> float:
        """Highest peak memory of the workers, in MB."""
        return max(worker["peak_mb"] for worker in self.figures)


class CannotRun(Exception):
    """A run ended too early. The text gives the reason."""


class Contender:
    """A run that works only during its turns."""

    def __init__(self, job: BenchJob) -> None:
        self._job = job
        self._lines: dict[int, Connection] = {}
        self._pids: list[int] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(job.address)
        self._socket.listen(job.workers)
        self._socket.settimeout(POLL_SECONDS)
        self._process = subprocess.Popen(
            job_module.command(job), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def step(self) -> float:
        """Make one turn of steps and return the seconds per step of the slowest worker.

        Raises:
            CannotRun: the run failed or hangs.
        """
        if not self._lines:
            self._accept_workers()
        for line in self._lines.values():
            with suppress(OSError):  # the worker is dead, and the next read reports it
                line.send("go")
        return max(answer["seconds"] for answer in self._answers("seconds"))

    def end(self) -> list[Figures]:
        """Return the figures that the workers report after the last step, by rank.

        Raises:
            CannotRun: the run failed or hangs.
        """
        return [answer["figures"] for answer in self._answers("figures")]

    def _accept_workers(self) -> None:
        until = time.monotonic() + SILENCE_SECONDS
        while len(self._lines) < self._job.workers:
            try:
                worker, _ = self._socket.accept()
            except TimeoutError:
                self._check(until)
                continue
            line = Connection(worker.detach())
            hello: Message = line.recv()
            self._lines[hello["rank"]] = line
            self._pids.append(hello["pid"])

    def _answers(self, kind: str) -> list[Message]:
        """Return one message of each worker, by rank."""
        answers: dict[int, Message] = {}
        until = time.monotonic() + SILENCE_SECONDS
        while len(answers) < len(self._lines):
            unanswered = {line: rank for rank, line in self._lines.items() if rank not in answers}
            for line in wait(list(unanswered), POLL_SECONDS):
                assert isinstance(line, Connection)
                try:
                    answer: Message = line.recv()
                except (EOFError, OSError):  # a worker is dead, and the launcher reports which one and why
                    self._process.wait(SILENCE_SECONDS)
                    self._check(until)
                    raise CannotRun("a worker ended early") from None
                if "absent" in answer:
                    raise CannotRun(answer["absent"])
                answers[unanswered[line]] = answer
            self._check(until, finished=kind == "figures")
        return [answers[rank] for rank in sorted(answers)]

    def _check(self, until: float, *, finished: bool = False) -> None:
        """Raise CannotRun if the run has failed or has sent nothing for too long."""
        if time.monotonic() > until:
            raise CannotRun(f"no output for {SILENCE_SECONDS:.0f} s: it hangs\n{self._last_words()}")
        if self._process.poll() is not None and not (finished and self._process.returncode == 0):
            raise CannotRun(self._last_words())

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().strip()
        if "out of memory" in text.lower():
            return "out of memory"
        return text[-1500:] or f"ended with status {self._process.returncode}"

    def close(self) -> None:
        """Stop all processes of the run."""
        for line in self._lines.values():
            line.close()
        with suppress(subprocess.TimeoutExpired):
            # A complete run exits without help, and so do workers that notice the closed connection.
            self._process.wait(10)
        for pid in self._pids if self._process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._log.close()


def run_together(
    jobs: Sequence[BenchJob], repeat: int, peak: Callable[[], float] | None = None
) -> tuple[dict[str, MeasuredRun], dict[str, str]]:
    """Let runs make their steps in turns, so that a busy moment of the machine affects all of them.

    Args:
        repeat: decides which run begins.
        peak: measures what the machine can do now, in FLOP/s. It is called before and after each turn.

    Returns:
        The runs, and the reasons why the missing ones could not run. Both are keyed by :func:`name_of`.
    """
    runs, reasons = {name_of(job): MeasuredRun() for job in jobs}, dict[str, str]()
    with ExitStack() as stack:
        contenders = {name_of(job): stack.enter_context(closing(Contender(job))) for job in jobs}
        for step in range(jobs[0].turns):
            # All runs warm up before the first step that counts. The run that begins changes with every turn.
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


def name_of(job: BenchJob) -> str:
    """Return the name of a run, which is the peer or else the solution."""
    return job.peer or job.solution
