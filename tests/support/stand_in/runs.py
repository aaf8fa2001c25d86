"""Runs that several tests use, on the stand-in device or on a real accelerator if there is one."""

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file

from rapidformer_templates.switches.offload_activations import transform as offloading
from tests.support import jobs, parallel_jobs, parity, stand_in
from tests.support.parity import Trained
from tests.support.stand_in import late
from tests.support.worker_pool import run_in_workers

DEVICE = stand_in.kind()
IS_REAL = DEVICE != stand_in.NAME
STEPS = (
    "--global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --adam-epsilon 1e-3 --no-export-model"
    " --dataloader-num-workers 0"
)
LATE = 0.002
"""Delay of side streams in seconds. With it, a copy that nobody waits for gives different numbers."""


class Case(NamedTuple):
    """A run to rehearse.

    Attributes:
        flags: flags in addition to :data:`STEPS`.
        precision: precision of the reference.
        job: name of a job of :mod:`tests.support.jobs`.
        devices: number of devices that it needs.
        steps: number of steps. With two, the second one uses what the first one has left.
    """

    flags: str
    precision: str = ""
    job: str = "causal"
    devices: int = 1
    steps: int = 2


CASES: Mapping[str, Case] = {
    "fp16": Case("--micro-batch-size 4 --mixed-precision fp16", "fp16"),
    "offloaded activations": Case("--micro-batch-size 8 --offload-activations"),
    "offloaded state": Case("--micro-batch-size 8 --cpu-offload"),
    "saved during training": Case("--micro-batch-size 8 --async-save --save-interval 1 --keep-checkpoints 1"),
    "pipeline": Case("--micro-batch-size 2 --pipeline-model-parallel-size 2", job="gpt2-4-tied", devices=2),
    "context, all to all × zero-2": Case(
        "--micro-batch-size 4 --context-parallel-size 2 --zero-2-memory-optimization", devices=2
    ),
    "context, in a ring": Case(
        "--micro-batch-size 8 --context-parallel-size 2 --context-parallel-kind ring", devices=2
    ),
}
"""Runs that test_runs.py compares with a CPU. test_sabotage.py repeats them with a line of the product removed."""


@cache
def rehearsed(case: Case) -> Trained:
    """Train with late streams, once per test process."""
    found: Trained = run_in_workers(case.devices, _rehearse, case, device=DEVICE)[0]
    return found


def _rehearse(workers: Any, case: Case) -> Trained:
    with nullcontext() if IS_REAL else late(side=LATE):
        return train_silently(case)


def train_silently(case: Case) -> Trained:
    """Train on the device with a hook that reads nothing, so that no unnecessary read waits for the device.

    If the run saves, the weights come from its checkpoint.
    """
    every = jobs.JOBS | parallel_jobs.OTHERS
    kind = type("Silent", (every[case.job],), {"on_step_end": _reads_nothing})
    flags = f"{flags_of(case)} --lr 1e-3 --log-interval 1 --device {DEVICE}".split()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(offloading, "MIN_BYTES", 0):  # small models
        save = ["--save", folder] if "--async-save" in flags or "--profile" in flags else []
        found = parity.trained(kind([*flags, *save]))
        if "--async-save" in flags:
            found["weights"] = saved_weights(Path(folder))
    found["curve"] = [(line["loss"], line["grad_norm"]) for line in found["lines"] if "loss" in line]
    return found


def _reads_nothing(template: Any, step: int, result: Any) -> None:
    pass


def flags_of(case: Case) -> str:
    """Return the flags of a case without the device."""
    return f"{STEPS} --train-iters {case.steps} {case.flags}"


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the last checkpoint of a run with one worker, in fp64.

    If it is damaged, the run keeps the one before.
    """
    checkpoint = max(folder.glob("checkpoints/step-*"), key=lambda path: int(path.name.partition("-")[2]))
    files = sorted(checkpoint.glob("weights-*.safetensors"))
    return {name: tensor.double() for file in files for name, tensor in load_file(file).items()}
