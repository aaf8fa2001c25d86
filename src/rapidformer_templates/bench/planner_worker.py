"""What a worker of ``bench planner`` does: train some steps in each layout, and tell what memory it took.

Every allocation and every release of torch's own allocator is recorded by its profiler, from before there
is a model until after the last step: what is alive at each moment is their sum, and nothing of the
planner takes part in it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rapidformer_templates import Data, Trainer
from rapidformer_templates.bench.partitioning_worker import resident_mb
from rapidformer_templates.workers import join

STEPS = 4
"""Optimizer steps of a run: from the second on there is optimizer state."""

MARK = "rapidformer: step "


@dataclass(frozen=True)
class Case:
    """One layout of one model.

    Attributes:
        model: a key of ``MODELS``.
        workers: how many.
        flags: of the layout, as on a training command.
    """

    model: str
    workers: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """What one worker took.

    Attributes:
        held: bytes of parameters, gradients, optimizer state and buckets, by the receipts.
        peaks: most bytes of the allocator in each step from the second on.
        resident_mb: memory of the process after the run.
    """

    held: dict[str, int]
    peaks: list[int]
    resident_mb: float


def measure(case: Case) -> Measured:
    """Train in this process, which is one of the case's workers."""
    from rapidformer_templates.bench.planner_models import MODELS

    sizes = MODELS[case.model]

    class Job(Trainer):
        def build_data(self) -> Data:
            # Collectives release what they have sent in threads of their own.
            threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self.profiler = profile(
                activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=threads
            )
            self.profiler.start()
            return Data(train=sizes.samples())

        def build_model(self) -> Any:
            return sizes.build()

        def on_step_end(self, step: int, result: Any) -> None:
            with record_function(f"{MARK}{step}"):
                pass
            if step == STEPS:
                self.profiler.stop()

    own = ["--device", "cpu", "--train-iters", str(STEPS), "--lr", "1e-4", "--template", "Trainer"]
    job = Job([*own, *case.flags])
    summary = job.fit()
    events = job.profiler.profiler.kineto_results.events()
    held = summary["receipts"]["held_bytes_by_rank"][torch.distributed.get_rank() if case.workers > 1 else 0]
    return Measured(held, peaks_of(events), resident_mb())


def peaks_of(events: Sequence[Any]) -> list[int]:
    """Most bytes alive in each step from the second on, from the allocations and releases that a profile has recorded."""
    ends = sorted(event.start_ns() for event in events if event.name().startswith(MARK))
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"))
    peaks = [0] * len(ends)
    alive = step = 0
    for when, size in changes:
        while step < len(ends) and when > ends[step]:
            step += 1
            if step < len(ends):
                peaks[step] = alive
        alive += size
        if step < len(ends):
            peaks[step] = max(peaks[step], alive)
    return peaks[1:]


def main() -> None:
    """``python -m … CASES FOLDER``: one process of a group that measures one case after another."""
    cases = [Case(c["model"], c["workers"], tuple(c["flags"])) for c in json.loads(sys.argv[1])]
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    with join("cpu") as workers:
        for index, case in enumerate(cases):
            gc.collect()  # or what the case before has left would be released during this one
            result = dataclasses.asdict(measure(case))
            (folder / f"{index}-{workers.rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
