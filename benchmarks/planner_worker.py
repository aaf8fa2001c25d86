"""What a worker of ``bench planner`` does: train some steps in each layout, and tell what memory it took.

Every storage that a real tensor has, from before there is a model until after the last step, is counted while
it is alive. On one worker the record of torch's own allocator stands beside it, in which nothing of this library
takes part; on several it would miss what the threads of the collectives release.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rapidformer_templates.commands.bench.worker import resident_mb
from rapidformer_templates.data.types import Data
from rapidformer_templates.switches.auto_strategy.live_storages import LiveStorages
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer

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
        peaks: most bytes of live storages in each step from the second on.
        allocator_peaks: the same by the record of the allocator; empty on several workers.
        resident_mb: memory of the process after the run.
    """

    held: dict[str, int]
    peaks: list[int]
    allocator_peaks: list[int]
    resident_mb: float


def measure(case: Case) -> Measured:
    """Train in this process, which is one of the case's workers."""
    from benchmarks.planner_models import MODELS

    sizes = MODELS[case.model]

    class Job(Trainer):
        def build_data(self) -> Data:
            self.peaks: list[int] = []
            self.watching = ExitStack()
            if case.workers == 1:
                self.record = self.watching.enter_context(
                    profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                )
            self.live = LiveStorages()
            self.watching.enter_context(_resizing_seen_by(self.live))
            self.watching.enter_context(self.live)
            return Data(train=sizes.samples())

        def build_model(self) -> Any:
            return sizes.build()

        def on_step_end(self, step: int, result: Any) -> None:
            with record_function(f"{MARK}{step}"):
                self.peaks.append(self.live.peak)
            self.live.restart()
            if step == STEPS:
                self.watching.close()

    own = ["--device", "cpu", "--train-iters", str(STEPS), "--lr", "1e-4", "--template", "Trainer", "--no-save"]
    job = Job([*own, *case.flags])
    summary = job.fit()
    recorded = peaks_of(job.record.profiler.kineto_results.events()) if case.workers == 1 else []
    held = summary["receipts"]["held_bytes_by_rank"][torch.distributed.get_rank() if case.workers > 1 else 0]
    return Measured(held, job.peaks[1:], recorded, resident_mb())


@contextmanager
def _resizing_seen_by(live: LiveStorages) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        live.resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_tell):
        yield


def peaks_of(events: Sequence[Any]) -> list[int]:
    """Most bytes alive in each step from the second on, from what a profile has recorded of the allocator."""
    ends = sorted(event.start_ns() for event in events if event.name().startswith(MARK))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
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
