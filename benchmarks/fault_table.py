"""``benchmarks fault-table``: one fault in a run of several workers, in each layout.

Each run makes :data:`FAULT_STEP` steps, and then a worker provokes a fault. The table shows how long the run takes to
end, what it prints, its status, what it leaves behind, and whether ``--resume`` then ends like an uninterrupted run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from benchmarks.contest import Answer, Columns, Flag, asks, progress, table
from benchmarks.killed_runs import difference, files_of, last_words
from benchmarks.trainees import Marks, Ours, Outcome
from benchmarks.worker_faults import ENGINES, PRELOADED, launch, processes_of, wait_for_end
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.trainer import Trainer

STEPS, FAULT_STEP = 12, 7
"""Number of steps of a run, and the step after which the fault happens. A checkpoint is saved every 3 steps."""

WORKER_TIMEOUT = 3
"""Seconds of ``--worker-timeout``."""

LONGEST = 300.0
"""Seconds after which a run that has not ended is killed."""

FLAGS = (
    Flag("engine", "all", "engine of the workers", choices=("all", *ENGINES)),
    Flag("fault", "all", "the fault, or the beginning of its name", kind=str),
    Flag("folder", None, "folder of the runs (default: a temporary folder)"),
)


def flip_a_bit(job: Trainer) -> None:
    """Flip the lowest bit of a weight of a norm, which most layouts keep on several workers."""
    weight: Any = next(p for name, p in job.model.named_parameters() if name.endswith("ln_1.weight"))
    with torch.no_grad():
        # ZeRO-3 keeps its partition in an attribute.
        values = weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight).data
        values.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def leave_without_memory(job: Trainer) -> None:
    """Limit the memory of this process to what it has, and ask for more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    torch.ones(2**30)


def compute_nan(job: Trainer) -> None:
    """Let the last layer of this worker return NaN in all later steps."""
    (head,) = (module for name, module in job.model.named_modules() if name.endswith("lm_head"))
    head.register_forward_hook(lambda module, arguments, output: output * float("nan"))


class Samples(list[dict[str, torch.Tensor]]):
    """A data set that can stop answering."""

    is_blocked = False

    def __getitem__(self, index: Any) -> Any:
        if Samples.is_blocked:
            time.sleep(600)
        return super().__getitem__(index)


def block_data(job: Trainer) -> None:
    Samples.is_blocked = True


FAULTS: Mapping[str, Callable[[Trainer], object]] = {
    "a flipped bit in a weight": flip_a_bit,
    "SIGSTOP": lambda job: os.kill(os.getpid(), signal.SIGSTOP),
    "a hook that sleeps": lambda job: time.sleep(600),
    "a data set that blocks": block_data,
    "one collective too many": lambda job: dist.all_reduce(torch.zeros(1)),
    "sys.exit(0)": lambda job: sys.exit(0),
    "os._exit(0)": lambda job: os._exit(0),
    "sys.exit(0) in all workers": lambda job: sys.exit(0),
    "NaN in the loss": compute_nan,
    "memory exhausted": leave_without_memory,
    "kill -9 of a worker": lambda job: os.kill(os.getpid(), signal.SIGKILL),
    "kill -9 of the launcher": lambda job: os.kill(os.getppid(), signal.SIGKILL),
}
"""Faults by name. The last worker provokes one, or all workers do, after :data:`FAULT_STEP`."""


class Faulty(Ours):
    """A run with a fault.

    Args:
        fault: Name of the fault.
        worker: Rank of the worker that provokes it, if not all do.
        others: Arguments of :class:`Ours`.
    """

    def __init__(self, fault: str, worker: int, *others: Any) -> None:
        super().__init__(*others)
        self._fault, self._worker = fault, worker

    def mark_phases(self, marks: Marks) -> None:
        """Do not wrap the functions of the package: messages name the lines of waits."""

    def train_samples(self, samples: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        return Samples(samples)

    def step_done(self, job: Trainer, step: int, marks: Marks) -> None:
        is_here = self._fault.endswith("all workers") or os.environ["RANK"] == str(self._worker)
        if step == FAULT_STEP and is_here:
            marks.struck = time.monotonic()
            FAULTS[self._fault](job)


class Ending(NamedTuple):
    """How a run ended.

    Attributes:
        status: Exit status of its launcher. A negative one is a signal. None if it had to be killed.
        seconds: Seconds from the fault until all processes had ended, or the lifetime of a run without a fault.
        survivors: Number of processes that had to be killed.
    """

    status: int | None
    seconds: float
    survivors: int


class Row(TypedDict):
    """A fault in a layout, as written to the JSON file.

    ``left`` and ``left_at_the_end`` are the files that an uninterrupted run does not have, after the fault and after
    the resumed run. ``difference`` is the first difference from the uninterrupted run.
    """

    engine: str
    fault: str
    seconds: float
    printed: str
    has_stack: bool
    status: int | None
    left: list[str]
    left_at_the_end: list[str]
    resumed: bool
    difference: str | None


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    engines = list(ENGINES) if options.engine == "all" else [options.engine]
    faults = [name for name in FAULTS if options.fault == "all" or name.startswith(options.fault)]
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-faults-")))
        advance = stack.enter_context(progress("faults", len(engines) * len(faults)))
        for engine in engines:
            layout = Layout(engine, folder / engine)
            for fault in faults:
                advance(f"{engine}: {fault}")
                rows.append(layout.provoke(fault))
    columns: Columns = {
        "engine": "{engine}",
        "fault": "{fault}",
        "printed": "{printed}",
        "status": "{status}",
        "ended after": "{seconds:.1f} s",
        "left": lambda row: ", ".join(row["left"]),
        "continued": lambda row: "no" if not row["resumed"] else row["difference"] or "identical",
    }
    failed = [row for row in rows if row["difference"] or not row["resumed"]]
    return Answer({"rows": rows}, table("one fault, then --resume", rows, columns, 3), [], status=int(bool(failed)))


class Layout:
    """An engine with its workers, and its uninterrupted run.

    Raises:
        RapidformerError: The uninterrupted run fails.
    """

    def __init__(self, engine: str, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._workers = 4 if engine == "tensor-pipeline" else 2
        flags = f"--nproc-per-node {self._workers} {ENGINES[engine]} --worker-timeout {WORKER_TIMEOUT}"
        self._job: tuple[Any, ...] = (engine, flags, STEPS, 4 if engine == "tensor-pipeline" else 2)
        folder.mkdir(parents=True, exist_ok=True)
        self._sound, run = Ours(*self._job), folder / "uninterrupted"
        if self._run(self._sound, run).status != 0:
            raise RapidformerError(f"the run without a fault failed: {last_words(run)}", where=f"{run}.log")
        self._expected: Outcome = self._sound.outcome(run)
        self._files = files_of(run)

    def provoke(self, fault: str) -> Row:
        """Run a job with a fault, and continue it without the fault."""
        run = self._folder / re.sub(r"\W+", "-", fault)
        ending = self._run(Faulty(fault, self._workers - 1, *self._job), run)
        text = Path(f"{run}.log").read_text(encoding="utf-8", errors="replace")
        left = sorted(files_of(run) - self._files) + ["a process"] * ending.survivors
        status = self._run(self._sound, run).status if ending.status != 0 else 0
        wrong = difference(self._expected, self._sound.outcome(run)) if status == 0 else None
        if status == 0 and not wrong:
            shutil.rmtree(run)
        return Row(
            engine=self._engine,
            fault=fault,
            seconds=round(ending.seconds, 1),
            printed=first_error(text),
            has_stack="Traceback" in text or "Exception raised from" in text,
            status=ending.status,
            left=left,
            left_at_the_end=sorted(files_of(run) - self._files) if run.exists() else [],
            resumed=status == 0,
            difference=wrong,
        )

    def _run(self, job: Ours, run: Path) -> Ending:
        """Run or continue a job until all of its processes have ended."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        marks: Any = context.RawArray(Marks, self._workers)
        process = context.Process(target=launch, args=(job, str(run), marks))
        began = time.monotonic()
        process.start()
        process.join(LONGEST)
        status = process.exitcode
        if status is None:
            for pid in processes_of(run):
                os.kill(pid, signal.SIGKILL)
        survivors = wait_for_end(run)
        process.join()
        struck = [mark.struck for mark in marks if mark.struck]
        return Ending(status, time.monotonic() - min(struck, default=began), survivors)


def first_error(log: str) -> str:
    """Return the first error of a run and its place, or its last line. The name of this machine becomes ``node``."""
    lines = log.strip().replace(f" {socket.gethostname()}", " node").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(("error: ", "stopped"))]
    if not starts:
        return lines[-1] if lines else ""
    error, *more = lines[starts[0] :]
    where = [line.removeprefix("  where  ") for line in more[:1] if line.startswith("  where  ")]
    return "; ".join([error.removeprefix("error: "), *where])
