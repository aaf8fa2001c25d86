"""Runs on stand-in devices follow the run of one process on a CPU.

Side streams are late, so that a copy that nobody waits for gives different numbers.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from rapidformer_templates.engines import local
from rapidformer_templates.engines.step import DynamicLossScale
from rapidformer_templates.switches.mixture_of_experts.layer import group_by_expert
from rapidformer_templates.switches.zero.engine import cast
from tests.support import parity, stand_in
from tests.support.dropout_runs import DropoutJob
from tests.support.jobs import OTHERS, CausalJob
from tests.support.parallel_jobs import JOBS, begin
from tests.support.parity import Trained, trained, weights_apart
from tests.support.stand_in import host_reads
from tests.support.stand_in.runs import CASES, DEVICE, IS_REAL, STEPS, Case, flags_of, rehearsed
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.missing(any_kind=True))]

ONE = {name: case for name, case in CASES.items() if case.devices == 1} | {
    "fp32": Case("--micro-batch-size 4"),
    "bf16": Case("--micro-batch-size 4 --mixed-precision bf16", "bf16"),
    "bf16 over fp32 parameters": Case("--micro-batch-size 4 --mixed-precision bf16 --keep-fp32-parameters", "bf16"),
    "recomputed": Case("--micro-batch-size 4 --checkpoint-activations"),
    "recomputed in parts": Case("--micro-batch-size 4 --recompute-activations"),
    "fused loss": Case("--micro-batch-size 4 --fused-linear-cross-entropy"),
    "loader processes": Case("--micro-batch-size 4 --dataloader-num-workers 2"),
    "profile": Case("--micro-batch-size 4 --profile 1", steps=4),
    "accumulated": Case("--micro-batch-size 2"),
    "compiled": Case("--micro-batch-size 4 --torch-compile aot_eager"),
}
"""Runs on one device."""

EXPERTS = "--micro-batch-size 4 --num-experts 4 --moe-ffn-hidden-size 16"
ALIKE = {
    "evaluated": Case("--micro-batch-size 4 --eval-interval 2", steps=4),
    "experts": Case(EXPERTS),
    "experts with room for few": Case(f"{EXPERTS} --moe-capacity-factor 0.8"),
    "shapes by length": Case(
        "--micro-batch-size 2 --data-iterator dynamic-shape --tokens-per-batch 80 --max-shapes 3",
        job="pretrained-causal",
        steps=4,
    ),
}
"""Runs whose numbers also differ from plain training on a CPU. Their reference has the same flags."""

TWO = {name: case for name, case in CASES.items() if case.devices == 2} | {
    "ddp": Case("--micro-batch-size 4", devices=2),
    "ddp, accumulated": Case("--micro-batch-size 2", devices=2),
    "distributed optimizer": Case("--micro-batch-size 4 --use-distributed-optimizer", devices=2),
    "fsdp": Case("--micro-batch-size 4 --fsdp-memory-optimization", devices=2),
    "tensor": Case("--micro-batch-size 4 --tensor-model-parallel-size 2", devices=2),
    "tensor, offloaded state": Case("--micro-batch-size 4 --tensor-model-parallel-size 2 --cpu-offload", devices=2),
    "oss": Case("--micro-batch-size 4 --oss-memory-optimization", devices=2),
    "oss-sdp": Case("--micro-batch-size 4 --oss-sdp-memory-optimization", devices=2),
}
PARTS = "--micro-batch-size 4 --tensor-model-parallel-size 2"
FOUR = {
    "tensor × pipeline": Case(f"{PARTS} --pipeline-model-parallel-size 2", job="gpt2-4-tied", devices=4),
    "tensor × zero-2": Case(f"{PARTS} --zero-2-memory-optimization", devices=4),
    "shards in groups": Case("--micro-batch-size 2 --fsdp-memory-optimization --fsdp-shard-size 2", devices=4),
    "context, all to all": Case("--micro-batch-size 2 --context-parallel-size 2", devices=4),
    "context, in a ring": Case(
        "--micro-batch-size 4 --context-parallel-size 4 --context-parallel-kind ring", devices=4
    ),
}
ENGINES = {name: case for name, case in TWO.items() if find_spec("fairscale") or not name.startswith("oss")}
ROUNDING = {"": 1e-4, "bf16": 2**-6, "fp16": 2**-9} if IS_REAL else {"": 1e-5, "bf16": 2**-7, "fp16": 2**-10}
"""Allowed distance between a device and a CPU. A real device has its own kernels, which sum in another order."""

OTHERS["dropout"] = DropoutJob


def _on_the_cpu(case: Case, flags: str) -> Trained:
    """Return the run of one process with other flags."""
    return parity.reference(case.job, False, f"{flags_of(case._replace(flags=flags))} --device cpu")


def _alone(case: Case) -> Trained:
    """Return plain training in the same precision."""
    precision = f"--mixed-precision {case.precision}" if case.precision else ""
    return _on_the_cpu(case, f"--micro-batch-size 4 {precision}")


def _follows(found: Trained, wanted: Trained, allowed: float) -> None:
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=allowed, atol=0)
    assert found["evaluations"] == pytest.approx(wanted["evaluations"], rel=allowed)
    assert weights_apart(found["weights"], wanted["weights"]) < max(allowed, 1e-5)


@pytest.mark.parametrize("name", ONE)
def test_one_device_follows_the_cpu(name: str) -> None:
    _follows(rehearsed(ONE[name]), _alone(ONE[name]), ROUNDING[ONE[name].precision])


@pytest.mark.parametrize("name", ALIKE)
def test_one_device_does_what_a_cpu_does_with_the_same_flags(name: str) -> None:
    case = ALIKE[name]
    found = rehearsed(case)
    _follows(found, _on_the_cpu(case, case.flags), ROUNDING[""])
    assert len(found["evaluations"]) == (2 if name == "evaluated" else 1)


@pytest.mark.distributed
@pytest.mark.skipif(**stand_in.missing(devices=2, any_kind=True))
@pytest.mark.parametrize("name", ENGINES)
def test_two_devices_follow_the_cpu(name: str) -> None:
    _follows(rehearsed(TWO[name]), _alone(TWO[name]), ROUNDING[""])


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.skipif(**stand_in.missing(devices=4, any_kind=True))
@pytest.mark.parametrize("name", FOUR)
def test_four_devices_follow_the_cpu(name: str) -> None:
    _follows(rehearsed(FOUR[name]), _alone(FOUR[name]), ROUNDING[""])


BEGINS = 2.0**20
"""A loss scale with which the first gradients overflow in 16 bits."""


class Scaled(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """Records for each step whether it was skipped, and the loss scale after it."""

    def make_scale(self) -> DynamicLossScale:
        self.scale = DynamicLossScale(BEGINS)
        return self.scale

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        self.outcomes = [*getattr(self, "outcomes", []), (bool(result.skipped), float(self.scale.scale))]


def _overflow(workers: Any, device: str) -> Any:
    flags = f"{STEPS} --train-iters 4 --micro-batch-size 4 --lr 1e-3 --mixed-precision fp16 --device {device}"
    template = Scaled(flags.split())
    with mock.patch.object(local, "DynamicLossScale", template.make_scale):
        return {**trained(template), "outcomes": template.outcomes}


def test_overflows_are_skipped_on_the_device_as_on_the_cpu() -> None:
    found = run_in_workers(1, _overflow, DEVICE, device=DEVICE)[0]
    wanted = _overflow(None, "cpu")
    halved = [(True, BEGINS / 2), (True, BEGINS / 4), (False, BEGINS / 4), (False, BEGINS / 4)]
    assert found["outcomes"] == wanted["outcomes"] == halved
    for run in (found, wanted):
        assert [math.isfinite(norm) for _, norm in run["curve"]] == [not skipped for skipped, _ in halved]
        run["curve"] = [(loss, norm if math.isfinite(norm) else -1.0) for loss, norm in run["curve"]]
    _follows(found, wanted, ROUNDING["fp16"])


def _die_and_go_on(workers: Any, folder: str) -> list[Any]:
    """Return losses and final checkpoint of a complete run with dropout, and of a run that dies and resumes.

    The complete run profiles its last step, which does not change its result.
    """
    flags = "--lr 1e-3 --train-iters 4 --micro-batch-size 2 --save-interval 2 --keep-checkpoints 9 --no-export-model"
    flags += f" --dataloader-num-workers 0 --device {stand_in.NAME}"
    found = []
    for name, parts in (("whole", [("--profile 1", None)]), ("cut", [("", 3), ("--resume", None)])):
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


class Silent(CausalJob):
    """A job whose hook reads nothing."""

    def on_step_end(self, step: int, result: Any) -> None:
        pass


def _reads_of_steps(workers: Any, steps: int) -> list[str]:
    """Return the host's reads from the device in a run that logs only its last step and neither evaluates nor saves."""
    flags = "--global-batch-size 8 --micro-batch-size 4 --log-interval 100 --lr 1e-3 --dataloader-num-workers 0"
    template = Silent([*flags.split(), "--train-iters", str(steps), "--device", stand_in.NAME])
    with host_reads() as read:
        template.fit()
    return read


@pytest.mark.skipif(**stand_in.missing())
def test_no_step_waits_for_the_device() -> None:
    few, many = (run_in_workers(1, _reads_of_steps, steps, device=stand_in.NAME)[0] for steps in (2, 5))
    assert sorted(few) == sorted(many)


def _reads_of_a_grouping(workers: Any) -> list[str]:
    tokens, chosen = torch.rand(6, 4).to(workers.device), torch.arange(12).view(6, 2).remainder(4).to(workers.device)
    with host_reads() as read:
        group_by_expert(tokens, chosen, None, 4)
    return read


@pytest.mark.skipif(**stand_in.missing())
def test_tokens_are_grouped_by_expert_without_a_wait() -> None:
    assert run_in_workers(1, _reads_of_a_grouping, device=stand_in.NAME) == [[]]


def _places_of_exact_values(workers: Any) -> set[str]:
    model = torch.nn.Linear(4, 4)
    return {values.device.type for _, values in cast(model, torch.bfloat16, workers).values()}


@pytest.mark.skipif(**stand_in.missing())
def test_exact_values_of_zero_wait_on_the_host() -> None:
    assert run_in_workers(2, _places_of_exact_values, device=stand_in.NAME) == [{"cpu"}] * 2
