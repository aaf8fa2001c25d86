"""Every engine in groups of NCCL ranks that share one GPU, beside one process on the CPU."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from rapidformer_templates.system.workers import Workers
from tests.support import covering
from tests.support.combinations import FP8, Combination, Size, accepted_on, distance, train
from tests.support.engine_layouts import NAMES
from tests.support.worker_pool import Failure, outcomes_in_workers, run_in_workers
from tests.switches.test_on_a_gpu import CHOICES, ROUNDING

DEVICE = "cuda"
HAS_GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.deepspeed,
    pytest.mark.distributed,
    pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: torch sees none here"),
]

LEFT_OUT = {"onnx-runtime", "nvme-offload", "deepspeed-config", "torch-compile", FP8}
"""Switches that exchange nothing of their own between ranks, and take minutes or further packages."""


def _runs() -> Iterator[Combination]:
    """Yield each layout of the engines, then the rows of the covering table that go beyond them."""
    seen = set()
    for names in (*NAMES.values(), *covering.table()["rows"]):
        kept = [name for name in names if name not in LEFT_OUT]
        found = accepted_on(DEVICE, kept, 2) or accepted_on(DEVICE, kept, 4)
        if found and (found.template, found.flags) not in seen:
            seen.add((found.template, found.flags))
            yield found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Find the runs only if there is a GPU."""
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", [*_runs()] if HAS_GPU else [], ids=lambda run: f"{run.world}-{run}")


@cache
def _on_the_cpu(template: str, flags: tuple[str, ...], size: Size) -> dict[str, Any]:
    return train(None, template, flags, size=size)


def test_ranks_follow_one_process(run: Combination, record_property: Any) -> None:
    found, *_ = run_in_workers(run.world, train, run.template, run.flags, "plain", run.size, device=DEVICE)
    apart = distance(found, _on_the_cpu(run.template, run.reference, run.size))
    record_property(run.plan.precision, apart.worst)
    flips = "mixture-of-experts" in run.plan.switches and run.plan.precision != "fp32"
    assert apart.worst <= (CHOICES if flips else ROUNDING[run.plan.precision]), str(apart)


def _one_fails(workers: Workers) -> None:
    if workers.rank == 1:
        raise ValueError("the batch of rank 1 is broken")
    workers.sum(1.0)  # waits for rank 1
    torch.distributed.all_reduce(torch.ones(1, device=workers.device))


def test_the_error_of_one_rank_arrives_while_the_other_waits() -> None:
    ended = outcomes_in_workers(2, _one_fails, device=DEVICE)
    assert isinstance(ended[1], Failure)
    assert (ended[1].kind, ended[1].text) == ("ValueError", "the batch of rank 1 is broken")
