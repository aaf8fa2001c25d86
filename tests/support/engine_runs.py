"""Runs with every engine that can die after a step."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.jobs import CausalJob
from tests.support.lines import Died

STEPS, SAVED = 6, 3

FLAGS = (
    f"--train-iters {STEPS} --save-interval {SAVED} --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --lr 1e-3"
    " --lr-decay-style cosine --lr-warmup-iters 2 --log-interval 1 --no-export-model"
)

ENGINES = {
    "plain": "",  # one process, or DDP
    "fsdp": "--fsdp-memory-optimization",
    "oss": "--oss-memory-optimization",
    "sdp": "--oss-sdp-memory-optimization",
    "zero-1": "--zero-1-memory-optimization",
    "zero-2": "--zero-2-memory-optimization",
    "zero-3": "--zero-3-memory-optimization --zero-3-param-persistence-threshold 40",
    "zero-1-offload": "--zero-1-memory-optimization --cpu-offload",
    "zero-2-offload": "--zero-2-memory-optimization --cpu-offload",
    "zero-3-offload": "--zero-3-memory-optimization --cpu-offload",
}


def run(folder: str, engine: str, workers: int, *flags: str, dies_after: int | None = None) -> Any:
    """Train and return (loss, gradient norm) of each step."""
    given = [*FLAGS.split(), *ENGINES[engine].split(), "--micro-batch-size", str(4 // workers), "--save", folder]
    job = CausalJob([*given, *flags])
    job.dies_after = dies_after
    ends = pytest.raises(Died) if dies_after else nullcontext()
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False), ends:
        job.fit()
    return job.curve


@dataclass(frozen=True)
class WholeRuns:
    """Uninterrupted runs of two workers, one for each engine that the selected tests read.

    Attributes:
        root: contains the run folder of each engine under the engine's name. Tests must not change it.
        curves: (loss, gradient norm) of each step, by engine.
    """

    root: Path
    curves: dict[str, Any]


def run_all(workers: Any, root: str, names: list[str]) -> dict[str, Any]:
    """Train with several engines and return the curves by engine."""
    return {name: run(f"{root}/{name}", name, workers.world) for name in names}
