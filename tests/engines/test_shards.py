"""Shards of gradients: put together, those of all workers are the gradient of one process, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import gather_whole
from tests.support import parity
from tests.support.parallel_jobs import JOBS
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
FLAGS = "--train-iters 1 --global-batch-size 8 --clip-grad 0"
JOB = "gpt2-4-tied"


def _gradients(flags: str) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a step by name, on rank 0, with the norm that the step reports as ``norm``."""
    gradients: dict[str, torch.Tensor] = {}
    norm = SingleEngine._grad_norm

    def gather_first(engine: SingleEngine) -> torch.Tensor:
        whole = gather_whole(engine.shards("gradients"), engine.workers) or {}
        gradients.update({name: gradient.clone() for name, gradient in whole.items()})
        return norm(engine)

    assert JOB in JOBS
    with mock.patch.object(SingleEngine, "_grad_norm", gather_first):
        run = parity.train(JOB, True, f"{FLAGS} {flags}")
    return gradients | {"norm": torch.tensor(run["curve"][0][1], dtype=torch.float64)}


def _in_workers(workers: Any, layouts: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {layout: _gradients(f"--micro-batch-size 2 {LAYOUTS[layout]}") for layout in layouts}


@pytest.fixture(scope="module")
def gradients() -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = run_in_workers(2, _in_workers, list(LAYOUTS))[0]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return _gradients("--micro-batch-size 2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_all_workers_are_the_gradient_of_one_process(
    layout: str, gradients: dict[str, dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]
) -> None:
    assert gradients[layout].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[layout][name], gradient, rtol=1e-9, atol=1e-12)


def test_the_norm_is_that_of_the_gathered_gradient(expected: dict[str, torch.Tensor]) -> None:
    square = sum(gradient.square().sum() for name, gradient in expected.items() if name != "norm")
    torch.testing.assert_close(torch.as_tensor(square).sqrt(), expected["norm"])
