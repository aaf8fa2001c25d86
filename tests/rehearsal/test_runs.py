"""Runs on stand-in devices follow the run of one process on a CPU: one device, and two under each engine.

Side streams are late, so that a copy that nobody waits for gives other numbers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.switches.offload_activations import offloader
from tests.support import stand_in
from tests.support.jobs import OTHERS, weights_apart
from tests.support.parallel_jobs import train_all
from tests.support.stand_in import host_reads, late
from tests.support.worker_group import run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.SKIP)]
STEPS = "--train-iters 4 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
LATE = 0.002

ONE = {
    "fp32": ("", "--micro-batch-size 4"),
    "bf16": ("bf16", "--micro-batch-size 4 --mixed-precision bf16"),
    "bf16 over fp32 parameters": ("bf16", "--micro-batch-size 4 --mixed-precision bf16 --keep-fp32-parameters"),
    "fp16": ("fp16", "--micro-batch-size 4 --mixed-precision fp16"),
    "recomputed": ("", "--micro-batch-size 4 --checkpoint-activations"),
    "recomputed in parts": ("", "--micro-batch-size 4 --recompute-activations"),
    "offloaded activations": ("", "--micro-batch-size 4 --offload-activations"),
    "offloaded state": ("", "--micro-batch-size 4 --cpu-offload"),
    "saved beside training": ("", "--micro-batch-size 4 --async-save --save-interval 1 --keep-checkpoints 1"),
    "fused loss": ("", "--micro-batch-size 4 --fused-linear-cross-entropy"),
    "loader processes": ("", "--micro-batch-size 4 --dataloader-num-workers 2"),
    "profile": ("", "--micro-batch-size 4 --profile 1"),
}
"""What is rehearsed on one device: the kind of its reference, and flags."""

TWO = {
    "ddp": "--micro-batch-size 4",
    "ddp, accumulated": "--micro-batch-size 2",
    "distributed optimizer": "--micro-batch-size 4 --use-distributed-optimizer",
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization",
    "tensor": "--micro-batch-size 4 --tensor-model-parallel-size 2",
    "pipeline": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
    "oss": "--micro-batch-size 4 --oss-memory-optimization",
    "oss-sdp": "--micro-batch-size 4 --oss-sdp-memory-optimization",
}
ENGINES = [name for name in TWO if find_spec("fairscale") or not name.startswith("oss")]
ROUNDING = {"": 1e-5, "bf16": 2**-7, "fp16": 2**-10}


def _train(workers: Any, folder: str, device: str, cases: dict[str, str]) -> dict[str, Any]:
    runs = {name: ("gpt2-4-tied", False, f"{STEPS} {flags} --device {device}") for name, flags in cases.items()}
    if device == "cpu":
        return train_all(None, folder, runs)
    with late(side=LATE), mock.patch.object(offloader, "LEAST_BYTES", 0):  # these models are small
        return train_all(workers, folder, runs)


def _rehearse(count: int, folder: Path, cases: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = run_in_workers(count, _train, str(folder), stand_in.NAME, cases, device=stand_in.NAME)[0]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process on a CPU, by what it computes in."""
    cases = {kind: f"--micro-batch-size 4 {f'--mixed-precision {kind}' if kind else ''}" for kind in ROUNDING}
    return _train(None, str(tmp_path_factory.mktemp("cpu")), "cpu", cases)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _rehearse(1, tmp_path_factory.mktemp("one"), {name: flags for name, (_, flags) in ONE.items()})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _rehearse(2, tmp_path_factory.mktemp("two"), {name: TWO[name] for name in ENGINES})


def _follows(found: dict[str, Any], wanted: dict[str, Any], allowed: float) -> None:
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=allowed, atol=0)
    assert weights_apart(found["weights"], wanted["weights"]) < max(allowed, 1e-5)


@pytest.mark.parametrize("name", ONE)
def test_one_device_follows_the_cpu(name: str, one: dict[str, Any], alone: dict[str, Any]) -> None:
    kind, _ = ONE[name]
    _follows(one[name], alone[kind], ROUNDING[kind])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ENGINES)
def test_two_devices_follow_the_cpu(name: str, two: dict[str, Any], alone: dict[str, Any]) -> None:
    _follows(two[name], alone[""], ROUNDING[""])


class Silent(OTHERS["gpt2-4-tied"]):  # type: ignore[misc]
    """Whose own hook reads nothing."""

    def on_step_end(self, step: int, result: Any) -> None:
        pass


def _reads_of_steps(workers: Any, steps: int) -> list[str]:
    """What the host reads of the device in a run that logs its last step alone, and neither evaluates nor saves."""
    flags = f"--global-batch-size 8 --micro-batch-size 4 --log-interval 100 --train-iters {steps} --lr 1e-3"
    template = Silent([*flags.split(), "--device", stand_in.NAME])
    with host_reads() as read:
        template.fit()
    return read


def test_no_step_waits_for_the_device() -> None:
    few, many = (run_in_workers(1, _reads_of_steps, steps, device=stand_in.NAME)[0] for steps in (3, 9))
    assert sorted(few) == sorted(many)
