"""Optimizers that need whole parameters, distributed over replicas, and the bytes of 16-bit weights with masters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates import OptimizerSpec
from rapidformer_templates.switches.optimizer.updates import Lamb
from tests.support.jobs import OTHERS
from tests.support.parallel_jobs import JOBS, begin, resumed, train_all
from tests.support.parity import reference
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed


CLIP = 0.1
STEPS = f"--train-iters 5 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1 --no-export-model"
DISTRIBUTED, PIPELINE = "--use-distributed-optimizer", "--pipeline-model-parallel-size 2"
ZERO_1, ZERO_2 = "--zero-1-memory-optimization", "--zero-2-memory-optimization"
CASES = {
    "lamb, data": ("unreached-4", f"--optimizer lamb {DISTRIBUTED}"),
    "lamb, pipeline": ("gpt2-4-tied", f"--optimizer lamb {PIPELINE} {ZERO_2}"),
    "adafactor, data": ("gpt2-4-tied", f"--optimizer adafactor {DISTRIBUTED} --ema-decay 0.9"),
    "adafactor, pipeline": ("gpt2-4-tied", f"--optimizer adafactor {PIPELINE} {ZERO_1}"),
    "muon, data": ("gpt2-4-tied", f"--optimizer muon {DISTRIBUTED}"),
    "own, data": ("own-lamb", DISTRIBUTED),
    "muon, frozen stage": ("frozen-8", f"--optimizer muon {PIPELINE} {ZERO_2}"),
}
"""(job, flags): four workers and micro batches of one sample, so that gradients are accumulated."""
SHORT = ("lamb, data",)
SPLIT = (DISTRIBUTED, PIPELINE, ZERO_1, ZERO_2)

RESUMED = f"{STEPS} --lr 1e-3 --optimizer adafactor --save-interval 1 --micro-batch-size 2"
CHAIN = ((f"{PIPELINE} {ZERO_2}", 2), (f"{DISTRIBUTED} --resume", 3), (f"{PIPELINE} {ZERO_1} --resume", 4))
"""(flags, step after which the run dies)."""


class OwnLamb(Lamb):
    """A user's optimizer: nobody knows which part of a parameter its update needs."""


class OwnOptimizer(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(OwnLamb, {"lr": 1e-3, "weight_decay": 0.1})


def _orthogonalized(gradient: torch.Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> torch.Tensor:
    """torch's iterations in the type of the gradient. In bfloat16, the last bit of a sum shows as a hundredth."""
    a, b, c = coefficients
    turned = gradient.T if gradient.size(0) > gradient.size(1) else gradient
    turned = turned / turned.norm().clamp(min=eps)
    for _ in range(steps):
        gram = turned @ turned.T
        turned = a * turned + (b * gram + c * gram @ gram) @ turned
    return turned.T if gradient.size(0) > gradient.size(1) else turned


@contextmanager
def _precise() -> Iterator[None]:
    iterations = mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _orthogonalized)
    with iterations, mock.patch.dict(OTHERS, {"own-lamb": OwnOptimizer}):
        yield


def _cases(names: list[str], *, alone: bool) -> dict[str, tuple[str, bool, str]]:
    cases = {}
    for name in names:
        job, flags = CASES[name]
        for words in SPLIT if alone else ():
            flags = flags.replace(words, "")
        cases[name] = (job, True, f"{STEPS} --micro-batch-size {8 if alone else 1} {flags}")
    return cases


def _train_all(workers: Any, names: list[str]) -> dict[str, Any]:
    with _precise():
        return train_all(workers, _cases(names, alone=False))


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The cases that the selected tests read."""
    return sorted({"lamb, data", *selected(request, "name")})


@pytest.fixture(scope="module")
def runs(names: list[str]) -> dict[str, Any]:
    return run_in_workers(4, _train_all, names)[0]


@pytest.fixture(scope="module")
def alone(names: list[str]) -> dict[str, Any]:
    with _precise():
        return train_all(None, _cases(names, alone=True))


@pytest.mark.parametrize("name", by_default(SHORT, CASES))
def test_every_step_is_that_of_one_process(name: str, runs: Any, alone: Any) -> None:
    close = {"rtol": 1e-10, "atol": 1e-10}
    found, wanted = (torch.tensor(run[name]["curve"], dtype=torch.float64) for run in (runs, alone))
    assert len(wanted) == 5
    assert (wanted[:, 1] > CLIP).all()
    torch.testing.assert_close(found, wanted, **close)
    assert runs[name]["weights"].keys() == alone[name]["weights"].keys()
    for parameter, weight in alone[name]["weights"].items():
        torch.testing.assert_close(runs[name]["weights"][parameter], weight, **close)


def test_each_worker_has_a_share_of_the_state(runs: Any, alone: Any) -> None:
    held, (whole,) = (r["lamb, data"]["summary"]["receipts"]["held_bytes_by_rank"] for r in (runs, alone))
    shares = [worker["optimizer_state_bytes"] for worker in held]
    assert sum(shares) == whole["optimizer_state_bytes"], "every parameter is updated once"
    assert max(shares) < 0.5 * whole["optimizer_state_bytes"]


@pytest.mark.longer
def test_a_run_goes_on_in_any_layout_and_in_one_process(tmp_path: Path) -> None:
    curve = run_in_workers(4, resumed, "gpt2-4-tied", str(tmp_path), RESUMED, CHAIN)[0]
    whole = reference("gpt2-4-tied", False, f"{STEPS} --lr 1e-3 --optimizer adafactor --micro-batch-size 8", lr=None)
    end = begin("gpt2-4-tied", str(tmp_path), f"{RESUMED} --resume")
    torch.testing.assert_close(torch.tensor([*curve[:-1], *end]), torch.tensor(whole["curve"]), rtol=1e-5, atol=1e-6)
