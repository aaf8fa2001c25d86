"""CPU offload alone: the same run bit by bit, with the optimizer in host memory.

On a CPU there is nothing to move. The tests make the engine believe that there is, so that they run the same code as a
GPU does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.engines import optimizer_state
from rapidformer_templates.engines.optimizer_state import HostOptimizer
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.planning.plan import EngineOptions
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from tests.support.dropout_runs import assert_same, run
from tests.support.parity import Trained, assert_follows, observed, reference, train
from tests.support.requests import CPU, GPUS, config_of
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

STEPS = "--train-iters 4 --global-batch-size 8 --micro-batch-size 4 --clip-grad 0.1 --weight-decay 0.1"


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Make the engine treat the CPU as a device with separate memory, with several chunks for a tiny model."""
    small = mock.patch.object(optimizer_state, "CHUNK_ELEMENTS", 500)
    with small, mock.patch("rapidformer_templates.engines.local.is_in_host_memory", return_value=False):
        yield


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with _elsewhere():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "optimizer"),
    by_default(
        [("causal", "adamw"), ("half-frozen", "adafactor")],
        [(job, name) for job in ("causal", "half-frozen") for name in ("adamw", "adamw_torch", "adafactor")],
    ),
)
def test_run_is_bitwise_the_one_without(job: str, optimizer: str) -> None:
    flags = f"{STEPS} --optimizer {optimizer}"
    expected = reference(job, False, flags)
    spy = mock.patch.object(HostOptimizer, "step", autospec=True, side_effect=HostOptimizer.step)
    with _elsewhere(), spy as stepped:
        actual = train(job, False, f"{flags} --cpu-offload")
    assert stepped.call_count == 4
    assert_follows(actual, expected, 0, 0)
    assert len(stepped.call_args.args[0]._chunks) > 2
    held, whole = (r["summary"]["receipts"]["optimizer_state_bytes"] for r in (actual, expected))
    assert held == whole


@pytest.mark.longer
@pytest.mark.usefixtures("elsewhere")
def test_checkpoints_pass_between_a_run_with_and_one_without(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "moved", dies_after=5)
    run(tmp_path / "moved", "--cpu-offload", "--resume", dies_after=8)
    run(tmp_path / "moved", "--resume")
    assert_same(tmp_path / "whole", tmp_path / "moved")


def _two_workers(workers: Any) -> Trained:
    with _elsewhere():
        return train("causal", False, f"{STEPS} --micro-batch-size 2 --cpu-offload")


@pytest.mark.distributed
def test_two_workers_are_bitwise_those_without() -> None:
    plain = observed(2, "causal", False, f"{STEPS} --micro-batch-size 2")
    for one, other in zip(run_in_workers(2, _two_workers), plain, strict=True):
        assert_follows(one, other, 0, 0)


def _host_optimizer(**options: Any) -> tuple[HostOptimizer, dict[str, torch.nn.Parameter]]:
    torch.manual_seed(1)
    parameters = {name: torch.nn.Parameter(torch.randn(3, 4)) for name in ("a", "b")}
    recipe = OptimizerSpec(torch.optim.AdamW, {"lr": 0.1, **options})
    return HostOptimizer(recipe, list(parameters.items()), {name: {} for name in parameters}), parameters


def test_parameter_without_a_gradient_stays_as_it_is() -> None:
    optimizer, parameters = _host_optimizer()
    plain = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    reference = torch.optim.AdamW(plain.values(), lr=0.1)
    for gradient in (torch.ones(3, 4), None, torch.full((3, 4), -2.0)):
        parameters["a"].grad, plain["a"].grad = gradient, gradient
        optimizer.step()
        reference.step()
        assert all(torch.equal(parameters[name], plain[name]) for name in plain)
    assert set(optimizer.state) == {parameters["a"]}


def test_plan_tells_that_a_cpu_run_has_nothing_to_move() -> None:
    def notes(flags: str, place: Any) -> list[str]:
        return [note for note in resolve(config_of(flags), place, REGISTRY).notes if note.startswith("cpu-offload")]

    assert resolve(config_of("--cpu-offload"), CPU).engine_options == EngineOptions(offload="cpu")
    (note,) = notes("--cpu-offload", CPU)
    assert "in host memory already" in note
    assert notes("--cpu-offload", GPUS) == []
    assert notes("--cpu-offload --zero-2-memory-optimization", GPUS) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none here")
@pytest.mark.parametrize("precision", ["", "--mixed-precision fp16"])
def test_state_of_a_gpu_run_is_in_host_memory(precision: str) -> None:
    optimizers: list[HostOptimizer] = []

    def kept(self: HostOptimizer, *arguments: Any) -> None:
        optimizers.append(self)
        create(self, *arguments)

    create = HostOptimizer.__init__
    flags = f"{STEPS} {precision}"
    expected = train("causal", False, flags)
    with mock.patch.object(HostOptimizer, "__init__", kept):
        actual = train("causal", False, f"{flags} --cpu-offload")
    tolerance = {"rtol": 2**-9, "atol": 0} if precision else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), **tolerance)
    (optimizer,) = optimizers
    assert {p.device.type for group in optimizer.param_groups for p in group["params"]} == {"cuda"}
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}
    assert all(copy.is_pinned() for group in optimizer.inner.param_groups for copy in group["params"])
