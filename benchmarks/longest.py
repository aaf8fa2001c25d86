"""One step on a sequence of 65,536 tokens in limited memory: on one worker, and divided over several.

``RLIMIT_DATA`` limits the memory that each process may use in addition to what it has before the model is built.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import Answer, Columns, Flag, Row, asks, progress, table
from benchmarks.planner_worker import long_llama
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import WorkerFailed
from rapidformer_templates.system import launch
from rapidformer_templates.trainer import Trainer

FLAGS = (
    Flag("workers", 4, "worker processes that share the sequence"),
    Flag("tokens", 65536, "tokens of the sequence"),
    Flag("cap", 700, "MB of memory that each process may use for the model and the training"),
)

COLUMNS: Columns = {"workers": "{workers}", "tokens": "{tokens:,}", "cap": "{cap:,} MB", "one step": "{outcome}"}


@asks(*FLAGS)
def answer(options: argparse.Namespace) -> Answer:
    with progress("longest", 2) as advance:
        rows = []
        for workers in (1, options.workers):
            rows.append(_row(workers, options))
            advance(f"{workers} workers")
    return Answer({"rows": rows}, table("a long sequence in limited memory", rows, COLUMNS, left=0), [], None)


def _row(workers: int, options: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        file = Path(folder) / "loss.json"
        words = [str(workers), str(options.tokens), str(options.cap), str(file)]
        command = [sys.executable, "-m", __name__, *words]
        try:
            if workers == 1:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            else:
                launch.run_workers(command, workers)
        except (subprocess.CalledProcessError, WorkerFailed):
            return {"workers": workers, "tokens": options.tokens, "cap": options.cap, "outcome": "no memory"}
        loss = json.loads(file.read_text(encoding="utf-8"))
        return {"workers": workers, "tokens": options.tokens, "cap": options.cap, "outcome": f"loss {loss:.4f}"}


class Job(Trainer):
    """Train on one sample of random tokens."""

    tokens: int
    cap: int

    def build_data(self) -> Data:
        row = torch.randint(512, (self.tokens,), generator=torch.Generator().manual_seed(0))
        return Data(train=[{"input_ids": row, "labels": row}])

    def build_model(self) -> Any:
        here = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_DATA, (here + self.cap,) * 2)
        return long_llama(2, self.tokens)

    def on_step_end(self, step: int, result: Any) -> None:
        self.loss = float(result.loss)


def main() -> None:
    """``python -m … WORKERS TOKENS CAP FILE``: run one process."""
    workers, tokens, cap, file = sys.argv[1:]
    Job.tokens, Job.cap = int(tokens), int(cap) * 10**6
    job = Job(
        f"--device cpu --train-iters 1 --lr 1e-3 --micro-batch-size 1 --no-save "
        f"--context-parallel-size {workers}".split()
    )
    job.fit()
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(job.loss), encoding="utf-8")


if __name__ == "__main__":
    main()
