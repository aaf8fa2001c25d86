"""The worker of ``benchmarks seconds``: trains a few steps in each layout and reports how long they took."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner_worker import MODELS
from rapidformer_templates.data.types import Data
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer

WARMUP, STEPS = 3, 6
"""Steps that do not count, and steps that do. The first ones allocate, and some engines rebuild their buckets."""


def measure(model: str, workers: int, flags: Sequence[str]) -> dict[str, Any]:
    """Train in this process, which is one of ``workers``, and return ``seconds`` of each step after the warm-up."""
    sizes = MODELS[model]
    ends = []

    class Job(Trainer):
        def build_data(self) -> Data:
            return Data(train=sizes.samples())

        def build_model(self) -> Any:
            return sizes.make(sizes.blocks)

        def on_step_end(self, step: int, result: Any) -> None:
            ends.append(time.perf_counter())

    own = [
        "--device",
        "cpu",
        "--train-iters",
        str(WARMUP + STEPS),
        "--lr",
        "1e-4",
        "--template",
        "Trainer",
        "--no-save",
    ]
    Job([*own, *flags]).fit()
    return {"seconds": [end - begin for begin, end in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)]}


def main() -> None:
    """``python -m … CASES FOLDER``: one process of a group that measures one case after another."""
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    with join("cpu") as workers:
        for index, case in enumerate(cases):
            gc.collect()
            (folder / f"{index}-{workers.rank}.json").write_text(json.dumps(measure(**case)), encoding="utf-8")


if __name__ == "__main__":
    main()
