"""Runs that ``faults`` and ``fault-table`` kill or break: a small GPT with dropout that reads the source of argparse.

The processes of a run are forked from one that has imported this module, so a run starts in a second. A run with
several workers starts with the launcher, from which its workers are forked. All else is as in ``--nproc-per-node``.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401  (a finished run draws its curves)
import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main as torchrun
from tqdm import tqdm
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.models import callbacks, gpt2, trainer_arguments
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.folder import RunFolder, read_metrics
from rapidformer_templates.system.phase_clock import EXCHANGE, PhaseClock
from rapidformer_templates.trainer import Trainer

STEPS, SAVE_EVERY, BATCH, LENGTH, LR = 60, 3, 8, 64, 1e-3

TIMINGS = {"samples_per_second", "tokens_per_second", "step_ms", "peak_memory_mb"}
"""Fields of a metrics line that differ between any two runs."""


class Place(IntEnum):
    """State of a process."""

    START = 0
    STEP = 1
    SAVE = 2
    END = 3
    EXCHANGE = 4


class Marks(ctypes.Structure):
    """The state of a process in shared memory, where the watching process reads it.

    Attributes:
        pid: Process id of a worker. 0 before it has started.
        stage: Place.START, STEP or END.
        saving, exchanging: Whether it saves, maybe in a thread, and whether it waits for other workers in a step.
        struck: ``time.monotonic()`` of a fault that the process has provoked itself. 0 before it.
    """

    _fields_ = (
        *((name, ctypes.c_int) for name in ("pid", "stage", "saving", "exchanging")),
        ("struck", ctypes.c_double),
    )

    @property
    def place(self) -> Place:
        return Place.SAVE if self.saving else Place.EXCHANGE if self.exchanging else Place(self.stage)


Outcome = dict[str, list[Any]]
"""Parts that are the same in two equal runs: lines of metrics, and contents of files."""


def prepare(folder: str) -> None:
    """Append the output of this process to ``FOLDER.log``, put temporary files into ``FOLDER.tmp``, use one thread."""
    os.environ["TMPDIR"] = tempfile.tempdir = f"{folder}.tmp"
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore between processes, which a kill would leak
    torch.set_num_threads(1)


def text_samples() -> list[dict[str, torch.Tensor]]:
    """Return pieces of the source of Python's argparse as bytes, for a causal language model."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    return [{"input_ids": piece, "labels": piece} for piece in text.split(LENGTH) if len(piece) == LENGTH]


def small_gpt(blocks: int = 2) -> Any:
    """Build a small GPT. Dropout is 0.1 everywhere, so the losses show if a random state was not restored."""
    return gpt2(blocks, 32, 2, 256, LENGTH, dropout=0.1)


def _marked(function: Callable[..., Any], marks: Marks, field: str) -> Callable[..., Any]:
    """Wrap a function, so that a field of ``marks`` is 1 while it runs."""

    def marked(*arguments: Any, **keywords: Any) -> Any:
        before = getattr(marks, field)
        setattr(marks, field, 1)
        try:
            return function(*arguments, **keywords)
        finally:
            setattr(marks, field, before)

    return marked


class Ours:
    """A run of this library. Each process runs the same command with ``--resume``.

    Args:
        flags: Additional flags of the command.
        steps: Number of steps. It evaluates three times.
        blocks: Number of blocks of the model.
    """

    def __init__(
        self, name: str = "rapidformer_templates", flags: str = "", steps: int = STEPS, blocks: int = 2
    ) -> None:
        self.name, self._flags, self._steps, self._blocks = name, flags, steps, blocks

    def mark_phases(self, marks: Marks) -> None:
        """Let this process set what it is doing in ``marks``."""
        checkpoint.save = _marked(checkpoint.save, marks, "saving")
        checkpoint.delete_older = _marked(checkpoint.delete_older, marks, "saving")
        for module, name in ((tensor_file, "write_copy"), (checkpoint.Attempt, "finish"), (checkpoint, "delete")):
            setattr(module, name, _marked(getattr(module, name), marks, "saving"))  # of --async-save
        clock: Any = PhaseClock
        clock.wait, enter = _marked(clock.wait, marks, "exchanging"), clock.enter

        def mark_and_enter(clock: PhaseClock, phase: str) -> None:
            enter(clock, phase)
            marks.exchanging = phase == EXCHANGE

        clock.enter = mark_and_enter

    def live(self, folder: Path, marks: Marks) -> None:
        self.mark_phases(marks)
        trainee, steps = self, self._steps

        class Job(Trainer):
            def build_data(self) -> Data:
                samples = text_samples()
                return Data(train=trainee.train_samples(samples[16:]), valid=samples[:16])

            def build_model(self) -> nn.Module:
                return small_gpt(trainee._blocks)

            def on_train_start(self) -> None:
                marks.stage = Place.STEP

            def on_step_end(self, step: int, result: Any) -> None:
                trainee.step_done(self, step, marks)

            def on_checkpoint(self, step: int, folder: Path) -> None:
                if step == steps:
                    marks.stage = Place.END

        flags = (
            f"{self._flags} --train-iters {steps} --micro-batch-size {BATCH} --lr {LR} --log-interval 1"
            f" --save-interval {SAVE_EVERY} --eval-interval {steps // 3} --device cpu --resume --save"
        )
        Job([*flags.split(), str(folder)]).fit()

    def train_samples(self, samples: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Return the data set of the training. Subclasses provoke faults here and in :meth:`step_done`."""
        return samples

    def step_done(self, job: Trainer, step: int, marks: Marks) -> None:
        """Called after each step, on each worker."""

    def outcome(self, folder: Path) -> Outcome:
        root = RunFolder(folder)
        lines = read_metrics(root.metrics)
        final = checkpoint.folder_of(root.checkpoints, self._steps)
        return {
            "metrics.jsonl": [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines],
            **{path.name: _contents(path) for path in sorted(final.glob("*.safetensors"))},
            "exported weights": _contents(root.export / "model.safetensors"),
        }


class TransformersTrainer:
    """The same run with transformers' Trainer, resumed from its last checkpoint as in its examples."""

    def __init__(self, name: str = "transformers' Trainer", steps: int = STEPS) -> None:
        self.name, self._steps = name, steps

    def live(self, folder: Path, marks: Marks) -> None:
        watch = callbacks(
            on_train_begin=lambda: setattr(marks, "stage", Place.STEP),
            on_train_end=lambda: setattr(marks, "stage", Place.END),
        )

        arguments = trainer_arguments(
            folder,
            max_steps=self._steps,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            logging_steps=1,
            save_steps=SAVE_EVERY,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=self._steps // 3,
            ddp_backend="gloo",
        )
        transformers.set_seed(arguments.seed)
        samples = text_samples()
        job = transformers.Trainer(
            small_gpt(), arguments, train_dataset=samples[16:], eval_dataset=samples[:16], callbacks=watch
        )
        marked: Any = job
        marked._save_checkpoint = _marked(marked._save_checkpoint, marks, "saving")
        if "RANK" in os.environ:
            marked.accelerator.backward = _marked(marked.accelerator.backward, marks, "exchanging")  # DDP's exchange
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        job.train(resume_from_checkpoint=last)
        job.save_model(str(folder / "export"))

    def outcome(self, folder: Path) -> Outcome:
        final = folder / f"checkpoint-{self._steps}"
        state = final / "trainer_state.json"  # a kill in the last save may leave a run without it
        history = json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.exists() else []
        timings = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
        return {
            "log_history": [{k: v for k, v in line.items() if k not in timings} for line in history],
            "checkpoint weights": _contents(final / "model.safetensors"),
            "exported weights": _contents(folder / "export" / "model.safetensors"),
        }


def _contents(path: Path) -> list[tuple[str, Any]]:
    """Return the contents of a safetensors file, bit for bit. The metadata are sorted: their order varies.

    The list is empty if there is no file.
    """
    if not path.exists():
        return []
    with safe_open(path, "pt") as file:
        tensors = [(name, file.get_tensor(name).numpy().tobytes()) for name in sorted(file.keys())]
        return [*sorted((file.metadata() or {}).items()), *tensors]


Trainee = Ours | TransformersTrainer

ENGINES = {
    "ddp": "",
    "fsdp": "--fsdp-memory-optimization",
    "zero-2": "--zero-2-memory-optimization",
    "zero-3": "--zero-3-memory-optimization",
    "tensor-pipeline": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    f" --global-batch-size {2 * BATCH}",
    "tensor-shards": "--tensor-model-parallel-size 2 --use-distributed-optimizer "
    f"--data-parallel-sharding-strategy optim_grads_params --global-batch-size {2 * BATCH}",
}
"""The flags of each engine."""

OF_FOUR = ("tensor-pipeline", "tensor-shards")
"""The engines that need four workers."""

PRELOADED = (
    __name__,
    "deepspeed",
    "rapidformer_templates.run.fit",
    "rapidformer_templates.switches.fsdp.engine",
    "rapidformer_templates.switches.layout.pipeline_engine",
    "rapidformer_templates.switches.zero.engine",
)
"""Modules that take seconds to import."""

LONGEST_END = 60.0
"""Seconds after a kill in which all processes must end. Others are killed, and reported as leftovers."""


def start(trainee: Trainee, run: Path, workers: int) -> tuple[Any, Any]:
    """Start or resume a run. Returns its first process, and the marks of its workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    marks: Any = context.RawArray(Marks, workers)
    process = context.Process(target=launch, args=(trainee, str(run), marks))
    process.start()
    return process, marks


def processes_of(run: Path) -> list[int]:
    """Return the ids of the processes that write to the log of a run. A zombie has no files."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(output) == f"{run}.log":
                found.append(int(output.parts[2]))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def wait_for_end(run: Path) -> int:
    """Wait until all processes of a run have ended. Returns the number of those that had to be killed."""
    deadline = time.monotonic() + LONGEST_END
    while (remaining := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    return len(remaining)


def launch(trainee: Trainee, folder: str, marks: Sequence[Marks]) -> None:
    """Run the launcher in this process: ours or torchrun. Its ``subprocess.Popen`` forks the workers.

    A run of one worker is this process itself.
    """
    prepare(folder)
    if len(marks) == 1:
        marks[0].pid = os.getpid()
        trainee.live(Path(folder), marks[0])
        return

    class ForkedWorker(subprocess.Popen[bytes]):
        def _execute_child(self, *arguments: Any) -> None:
            environment: Mapping[str, str] = arguments[6] or {}
            if "RANK" not in environment or "RANK" in os.environ:  # another program, or started by a worker
                super()._execute_child(*arguments)  # type: ignore[misc]
                return
            self._child_created, self.pid = True, os.fork()
            if self.pid == 0:
                _work(trainee, folder, marks[int(environment["RANK"])], environment)

    sys.modules["__main__"] = sys.modules[__name__]  # a program that workers could run again
    for module in (subprocess, subprocess_handler):
        vars(module)["Popen"] = ForkedWorker
    if isinstance(trainee, Ours):
        try:
            trainee.live(Path(folder), Marks())
        except RapidformerError as error:  # as a script's main() does
            print(error.render(), file=sys.stderr)
            sys.exit(error.exit_status)
    else:
        torchrun(["--standalone", "--nproc-per-node", str(len(marks)), "script"])


def _work(trainee: Trainee, folder: str, marks: Marks, environment: Mapping[str, str]) -> NoReturn:
    """Run one worker in this process, which has none of the launcher's files, signal handlers and variables."""
    status = 1
    try:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        marks.pid = os.getpid()
        trainee.live(Path(folder), marks)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# The results of a run.


def files_of(run: Path) -> set[str]:
    """Return the names in the folder of a run and in its temporary folder, without finished checkpoints."""
    names = [f"/{path.relative_to(run)}" for path in run.rglob("*")]
    names += [f".tmp/{path.name}" for path in Path(f"{run}.tmp").iterdir()]
    return {name for name in names if not re.search(r"/(step|checkpoint)-\d+(/|$)", name)}


def last_words(run: Path) -> str:
    """Return the last line of the run's log, without the path of its folder."""
    lines = Path(f"{run}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].replace(f"{run}/", "") if lines else "no output"


def difference(expected: Outcome, actual: Outcome) -> str | None:
    """Describe the first difference between two outcomes."""
    for part, value in expected.items():
        other = actual.get(part, [])
        if len(value) != len(other):
            return f"{part} has {len(other)} entries instead of {len(value)}"
        for number, (wanted, found) in enumerate(zip(value, other, strict=True), start=1):
            if wanted != found:
                words = f"{found} instead of {wanted}" if isinstance(wanted, dict) else wanted[0]
                return f"{part}, entry {number}: {words}"
    return None
