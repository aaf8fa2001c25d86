"""Shards of gradients: put together, those of all workers are the gradient of one process, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import gather_whole
from rapidformer_templates.planning.environment import installed_packages
from tests.support import parity
from tests.support.parallel_jobs import JOBS
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAYOUTS = {
    "DDP": "",
    "FSDP": "--fsdp-memory-optimization",
    "divided update": "--use-distributed-optimizer",
    "divided gradients": "--zero-2-memory-optimization --tensor-model-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline with tied embeddings": "--pipeline-model-parallel-size 2",
}
if "deepspeed" in installed_packages():
    LAYOUTS |= {
        "ZeRO-1": "--zero-1-memory-optimization",
        "ZeRO-2": "--zero-2-memory-optimization",
        "ZeRO-2, offload": "--zero-2-memory-optimization --cpu-offload",
        "ZeRO-3": "--zero-3-memory-optimization",
        "ZeRO-3, offload": "--zero-3-memory-optimization --cpu-offload",
    }
LONGER = {"divided update", "tensor", "ZeRO-2", "ZeRO-3"}
"""For ``make test-longer``. Another layout combines each of them with something more."""
FLAGS = "--train-iters 1 --global-batch-size 8 --clip-grad 0"
JOB = "gpt2-4-tied"


def _gradients(flags: str) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a step by name, on rank 0, with the norm that the step reports as ``norm``."""
    gradients: dict[str, torch.Tensor] = {}
    setup = SingleEngine.setup

    def gather_before_update(engine: SingleEngine, *arguments: Any) -> None:
        setup(engine, *arguments)

        def gather() -> None:
            whole = gather_whole(engine.shards("gradients"), engine.workers)
            gradients.update({name: gradient.clone() for name, gradient in whole})

        engine.before_update.append(gather)

    assert JOB in JOBS
    in_deepspeed = "zero" in flags and "tensor" not in flags  # it computes in fp32 at most
    with mock.patch.object(SingleEngine, "setup", gather_before_update):
        run = parity.train(JOB, not in_deepspeed, f"{FLAGS} {flags}")
    return gradients | {"norm": torch.tensor(run["curve"][0][1], dtype=torch.float64)}


def _in_workers(workers: Any, layouts: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {layout: _gradients(f"--micro-batch-size 2 {LAYOUTS[layout]}") for layout in layouts}


@pytest.fixture(scope="module")
def gradients(request: pytest.FixtureRequest) -> dict[str, dict[str, torch.Tensor]]:
    layouts = selected(request, "layout")
    found: dict[str, dict[str, torch.Tensor]] = run_in_workers(2, _in_workers, layouts)[0]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return _gradients("--micro-batch-size 2")


@pytest.mark.parametrize("layout", by_default(LAYOUTS.keys() - LONGER, LAYOUTS))
def test_shards_of_all_workers_are_the_gradient_of_one_process(
    layout: str, gradients: dict[str, dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]
) -> None:
    assert gradients[layout].keys() == expected.keys()
    rtol, atol = (1e-4, 1e-6) if layout.startswith("ZeRO") else (1e-9, 1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[layout][name].double(), gradient, rtol=rtol, atol=atol)


def test_the_norm_is_that_of_the_gathered_gradient(expected: dict[str, torch.Tensor]) -> None:
    square = sum(gradient.square().sum() for name, gradient in expected.items() if name != "norm")
    torch.testing.assert_close(torch.as_tensor(square).sqrt(), expected["norm"])
