"""Runs of a table: solutions of this library or of peers, in separate worker processes that take turns.

``python -m rapidformer_templates.commands.bench.runs JSON`` starts the workers of a run. Each worker connects to the
benchmark and waits for a message before every turn of steps. After a turn it reports the seconds per step. At the end
it reports the bytes that it held and its peak memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from rapidformer_templates.commands.bench.job_peers import PEERS
from rapidformer_templates.commands.bench.tables import RUN, TABLES
from rapidformer_templates.commands.bench.worker import (
    CLIP,
    LR,
    SEED,
    WEIGHT_DECAY,
    BenchConnection,
    BenchJob,
    Figures,
    Message,
    PeerUnavailable,
    RandomTokens,
    build_model,
)
from rapidformer_templates.errors import Explained
from rapidformer_templates.system import launch
from rapidformer_templates.system.processes import wait_at_exit

if TYPE_CHECKING:
    from torch import nn

    from rapidformer_templates.data.types import Batch
    from rapidformer_templates.engines.contract import StepResult


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
        command = [sys.executable, "-m", __name__, json.dumps(asdict(job))]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def step(self) -> float:
        """Make one turn of steps and return the seconds per step of the slowest worker.

        Raises:
            CannotRun: the run failed or hangs.
        """
        if not self._lines:
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


def run_this_library(job: BenchJob, line: BenchConnection) -> None:
    """Run a solution of this library with its flags, as a user would give them. The added hooks only measure."""
    from rapidformer_templates.data.types import Data
    from rapidformer_templates.trainer import Trainer

    class MeasuredScript(Trainer):
        def build_data(self) -> Data:
            return Data(train=RandomTokens(job))

        def build_model(self) -> nn.Module:
            line.before_model()
            return build_model(job.sizes)

        def on_train_start(self) -> None:
            line.training_starts()

        def on_step_end(self, step: int, result: StepResult) -> None:
            self.loss = result.loss
            line.step_ends()

    template = MeasuredScript(flags_of(job))
    summary = template.fit()
    line.end(float(template.loss), summary["receipts"].get("held_bytes_by_rank"))


def flags_of(job: BenchJob) -> list[str]:
    """Return the command line for a run of this library."""
    words = list(TABLES[job.table].solutions[job.solution].flags)
    if words[-1:] == ["--nvme-path"]:
        words.append(job.nvme)
    if job.precision != "fp32":
        words += ["--mixed-precision", job.precision]
    flags = [
        *("--device", job.device, "--micro-batch-size", job.sizes.micro_batch),
        *("--global-batch-size", job.global_batch, "--train-iters", job.total_steps, "--log-interval", job.total_steps),
        *("--lr", LR, "--lr-decay-style", "constant", "--weight-decay", WEIGHT_DECAY),
        *("--clip-grad", CLIP, "--optimizer", "adamw_torch_fused", "--seed", SEED, "--no-save", *words),
    ]
    return [str(flag) for flag in flags]


def run_user_command(job: BenchJob, line: BenchConnection) -> None:
    """Run the user's training command with its model and data, for the number of steps that are measured.

    Its model FLOPs are counted for the shapes of the first batch.
    """
    from rapidformer_templates.commands.bench.flops import training_flops_of
    from rapidformer_templates.commands.main import template_of
    from rapidformer_templates.data.collate import samples_in

    class MeasuredCommand(template_of(job.words)):  # type: ignore[misc]
        flops: float | None = None

        def build_model(self) -> nn.Module:
            line.before_model()
            model: nn.Module = super().build_model()
            self.kind, self.settings = type(model), getattr(model, "config", None)
            return model

        def compute_loss(self, model: nn.Module, batch: Batch) -> Any:
            if self.flops is None:
                # Counted before the forward of the first warm-up step, for architectures of transformers only.
                self.flops = training_flops_of(self.kind, self.settings, batch) / max(samples_in(batch), 1)
            return super().compute_loss(model, batch)

        def on_train_start(self) -> None:
            line.training_starts()

        def on_step_end(self, step: int, result: StepResult) -> None:
            self.loss = result.loss
            line.step_ends()

    flags = ["--train-iters", str(job.total_steps), "--log-interval", str(job.total_steps), "--no-save"]
    template = MeasuredCommand([*job.words, *flags])
    summary = template.fit()
    sizes = template.plan.sizes
    line.end(
        float(template.loss),
        summary["receipts"].get("held_bytes_by_rank"),
        flops=(template.flops or 0.0) * sizes.global_batch,
        global_batch=sizes.global_batch,
        parameters=summary["parameters"],
        precision=template.plan.precision,
        switches=list(template.plan.switches),
    )


def run_job(job: BenchJob) -> None:
    """Run the job in one worker."""
    line = BenchConnection(job)
    try:
        (PEERS[job.peer] if job.peer else run_user_command if job.table == RUN else run_this_library)(job, line)
    except PeerUnavailable as error:
        line.absent(error.message)


def main() -> int:
    """Start the workers of a run, or run the job if this process is one of them."""
    job = BenchJob(**json.loads(sys.argv[1]))
    if launch.is_worker():
        wait_at_exit()  # a peer may create the process group itself
        launch.report_errors(lambda: run_job(job))
        return 0
    try:
        launch.run_workers(launch.program_command(), job.workers)
    except Explained as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
