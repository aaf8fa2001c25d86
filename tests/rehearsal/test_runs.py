"""Runs on stand-in devices follow the run of one process on a CPU: one device, two under each engine, four.

Side streams are late, so that a copy that nobody waits for gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from rapidformer_templates.engines import local
from rapidformer_templates.engines.loss_scale import DynamicLossScale
from rapidformer_templates.switches.offload_activations import offloader
from tests.support import stand_in
from tests.support.dropout_runs import DropoutJob
from tests.support.jobs import OTHERS, result_of, weights_apart
from tests.support.parallel_jobs import JOBS, begin, train_all
from tests.support.stand_in import host_reads, late
from tests.support.worker_group import run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.missing(any_kind=True))]
DEVICE = stand_in.kind()
IS_REAL = DEVICE != stand_in.NAME
STEPS = (
    "--train-iters 4 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --dataloader-num-workers 0"
)
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
    "accumulated": ("", "--micro-batch-size 2"),
    "compiled": ("", "--micro-batch-size 4 --torch-compile aot_eager"),
}
"""What is rehearsed on one device: the kind of its reference, and flags."""

EXPERTS = "--micro-batch-size 4 --num-experts 4 --moe-ffn-hidden-size 16"
ALIKE = {
    "evaluated": ("gpt2-4-tied", "--micro-batch-size 4 --eval-interval 2"),
    "experts": ("gpt2-4-tied", EXPERTS),
    "experts with room for few": ("gpt2-4-tied", f"{EXPERTS} --moe-capacity-factor 0.8"),
    "shapes by length": (
        "pretrained-causal",
        "--micro-batch-size 2 --data-iterator dynamic-shape --tokens-per-batch 80 --max-shapes 3",
    ),
}
"""What gives other numbers than plain training, on a CPU, too: the job and flags of both."""

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
PARTS = "--micro-batch-size 4 --tensor-model-parallel-size 2"
FOUR = {
    "tensor × pipeline": f"{PARTS} --pipeline-model-parallel-size 2",
    "tensor × zero-2": f"{PARTS} --zero-2-memory-optimization",
    "shards in groups": "--micro-batch-size 2 --fsdp-memory-optimization --fsdp-shard-size 2",
    "context, all to all": "--micro-batch-size 2 --context-parallel-size 2",
    "context, in a ring": "--micro-batch-size 4 --context-parallel-size 4 --context-parallel-kind ring",
}
ENGINES = [name for name in TWO if find_spec("fairscale") or not name.startswith("oss")]
ROUNDING = {"": 1e-4, "bf16": 2**-6, "fp16": 2**-9} if IS_REAL else {"": 1e-5, "bf16": 2**-7, "fp16": 2**-10}
"""How far a device may be from a CPU: a real one has kernels of its own, which add up in another order."""


OTHERS["dropout"] = DropoutJob
Cases = Mapping[str, tuple[str, str]]


def _train(workers: Any, folder: str, device: str, cases: Cases) -> dict[str, Any]:
    runs = {name: (job, False, f"{STEPS} {flags} --device {device}") for name, (job, flags) in cases.items()}
    if device == "cpu":
        return train_all(None, folder, runs)
    with (
        nullcontext() if IS_REAL else late(side=LATE),
        mock.patch.object(offloader, "LEAST_BYTES", 0),
    ):  # these models are small
        return train_all(workers, folder, runs)


def _plain(cases: Mapping[str, str]) -> Cases:
    return {name: ("gpt2-4-tied", flags) for name, flags in cases.items()}


def _rehearse(count: int, folder: Path, cases: Cases) -> dict[str, Any]:
    found: dict[str, Any] = run_in_workers(count, _train, str(folder), DEVICE, cases, device=DEVICE)[0]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process on a CPU, by what it computes in."""
    cases = {kind: f"--micro-batch-size 4 {f'--mixed-precision {kind}' if kind else ''}" for kind in ROUNDING}
    return _train(None, str(tmp_path_factory.mktemp("cpu")), "cpu", {**_plain(cases), **ALIKE})


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = _plain({name: flags for name, (_, flags) in ONE.items()})
    return _rehearse(1, tmp_path_factory.mktemp("one"), {**cases, **ALIKE})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _rehearse(2, tmp_path_factory.mktemp("two"), _plain({name: TWO[name] for name in ENGINES}))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _rehearse(4, tmp_path_factory.mktemp("four"), _plain(FOUR))


def _follows(found: dict[str, Any], wanted: dict[str, Any], allowed: float) -> None:
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=allowed, atol=0)
    assert weights_apart(found["weights"], wanted["weights"]) < max(allowed, 1e-5)


@pytest.mark.parametrize("name", ONE)
def test_one_device_follows_the_cpu(name: str, one: dict[str, Any], alone: dict[str, Any]) -> None:
    kind, _ = ONE[name]
    _follows(one[name], alone[kind], ROUNDING[kind])


@pytest.mark.parametrize("name", ALIKE)
def test_one_device_does_what_a_cpu_does_with_the_same_flags(
    name: str, one: dict[str, Any], alone: dict[str, Any]
) -> None:
    _follows(one[name], alone[name], ROUNDING[""])
    assert one[name]["evaluations"] == pytest.approx(alone[name]["evaluations"], rel=ROUNDING[""])
    assert len(one["evaluated"]["evaluations"]) == 2


@pytest.mark.distributed
@pytest.mark.skipif(**stand_in.missing(devices=2, any_kind=True))
@pytest.mark.parametrize("name", ENGINES)
def test_two_devices_follow_the_cpu(name: str, two: dict[str, Any], alone: dict[str, Any]) -> None:
    _follows(two[name], alone[""], ROUNDING[""])


@pytest.mark.distributed
@pytest.mark.skipif(**stand_in.missing(devices=4, any_kind=True))
@pytest.mark.parametrize("name", FOUR)
def test_four_devices_follow_the_cpu(name: str, four: dict[str, Any], alone: dict[str, Any]) -> None:
    _follows(four[name], alone[""], ROUNDING[""])


BEGINS = 2.0**20
"""A loss scale under which the first gradients overflow in 16 bits."""


class Scaled(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """Sees of each step whether it was skipped, and the loss scale after it."""

    def make_scale(self) -> DynamicLossScale:
        self.scale = DynamicLossScale(BEGINS)
        return self.scale

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        self.outcomes = [*getattr(self, "outcomes", []), (bool(result.skipped), float(self.scale.scale))]


def _overflow(workers: Any, folder: str, device: str) -> dict[str, Any]:
    flags = f"{STEPS} --micro-batch-size 4 --lr 1e-3 --mixed-precision fp16 --device {device}"
    template = Scaled([*flags.split(), "--save", folder])
    with mock.patch.object(local, "DynamicLossScale", template.make_scale):
        return {**result_of(template, folder), "outcomes": template.outcomes}


def test_overflows_are_skipped_on_the_device_as_on_the_cpu(tmp_path: Path) -> None:
    found = run_in_workers(1, _overflow, str(tmp_path / "device"), DEVICE, device=DEVICE)[0]
    wanted = _overflow(None, str(tmp_path / "cpu"), "cpu")
    halved = [(True, BEGINS / 2), (True, BEGINS / 4), (False, BEGINS / 4), (False, BEGINS / 4)]
    assert found["outcomes"] == wanted["outcomes"] == halved
    for run in (found, wanted):
        assert [math.isfinite(norm) for _, norm in run["curve"]] == [not skipped for skipped, _ in halved]
        run["curve"] = [(loss, norm if math.isfinite(norm) else -1.0) for loss, norm in run["curve"]]
    _follows(found, wanted, ROUNDING["fp16"])


def _die_and_go_on(workers: Any, folder: str) -> list[Any]:
    """A run with dropout that is whole, and one that dies and goes on: losses, and what is saved at the end."""
    flags = "--lr 1e-3 --train-iters 4 --micro-batch-size 2 --save-interval 2 --keep-checkpoints 9 --no-export-model"
    flags += f" --dataloader-num-workers 0 --device {stand_in.NAME}"
    found = []
    for name, parts in (("whole", [("", None)]), ("cut", [("", 3), ("--resume", None)])):
        save = f"{folder}/{name}"
        curves = [begin("dropout", save, f"{flags} {more}", dies_after) for more, dies_after in parts]
        saved = sorted(Path(save, "checkpoints/step-4").glob("*.safetensors"))
        found.append((curves[-1][-2:], {file.name: load_file(file) for file in saved}))
    return found


@pytest.mark.skipif(**stand_in.missing())
def test_a_run_with_dropout_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, resumed = run_in_workers(1, _die_and_go_on, str(tmp_path), device=stand_in.NAME)[0]
    assert resumed[0] == whole[0]
    assert resumed[1].keys() == whole[1].keys()
    for file, tensors in whole[1].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed[1][file][name]), name


class Silent(OTHERS["gpt2-4-tied"]):  # type: ignore[misc]
    """Whose own hook reads nothing."""

    def on_step_end(self, step: int, result: Any) -> None:
        pass


def _reads_of_steps(workers: Any, steps: int) -> list[str]:
    """What the host reads of the device in a run that logs its last step alone, and neither evaluates nor saves."""
    flags = "--global-batch-size 8 --micro-batch-size 4 --log-interval 100 --lr 1e-3 --dataloader-num-workers 0"
    template = Silent([*flags.split(), "--train-iters", str(steps), "--device", stand_in.NAME])
    with host_reads() as read:
        template.fit()
    return read


@pytest.mark.skipif(**stand_in.missing())
def test_no_step_waits_for_the_device() -> None:
    few, many = (run_in_workers(1, _reads_of_steps, steps, device=stand_in.NAME)[0] for steps in (3, 9))
    assert sorted(few) == sorted(many)
