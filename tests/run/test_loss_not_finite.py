"""A loss that is not finite is named with its samples and with the worker that computed it."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
import torch

from rapidformer_templates.errors import NonFiniteLoss
from rapidformer_templates.planning.environment import installed_packages
from tests.support.parallel_jobs import JOBS
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

POISONED = 6

LAYOUTS = {
    "DDP": "",
    "FSDP": "--fsdp-memory-optimization",
    "divided update": "--use-distributed-optimizer",
    "pipeline": "--pipeline-model-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2",
}
if "deepspeed" in installed_packages():
    LAYOUTS |= {"ZeRO-2": "--zero-2-memory-optimization", "ZeRO-3": "--zero-3-memory-optimization"}


class Poisoned(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """The loss of a batch with sample :data:`POISONED` is infinite."""

    has_met = False

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        tokens = torch.as_tensor(self.data.train[POISONED]["input_ids"])
        loss = super().compute_loss(model, batch)
        if any(torch.equal(row[: len(tokens)], tokens) for row in batch["input_ids"]):
            self.has_met = True
            return loss * torch.inf
        return loss


def _in_worker(workers: Any, layouts: list[str]) -> dict[str, tuple[bool, str | None]]:
    told = {}
    for layout in layouts:
        flags = "--micro-batch-size 1 --global-batch-size 4 --train-iters 40 --lr 1e-3 --no-save"
        job = Poisoned([*flags.split(), *LAYOUTS[layout].split()])
        with pytest.raises(NonFiniteLoss) as caught:
            job.fit()
        told[layout] = job.has_met, caught.value.where
    return told


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> list[dict[str, tuple[bool, str | None]]]:
    found: list[dict[str, tuple[bool, str | None]]] = run_in_workers(2, _in_worker, selected(request, "layout"))
    return found


@pytest.mark.parametrize("layout", by_default(["DDP", "FSDP", "pipeline", "tensor"], LAYOUTS))
def test_the_worker_and_its_sample_are_named(layout: str, told: list[dict[str, tuple[bool, str | None]]]) -> None:
    messages = {where for _, where in (of_worker[layout] for of_worker in told)}
    assert len(messages) == 1
    (where,) = messages
    met = [rank for rank, of_worker in enumerate(told) if of_worker[layout][0]]
    if layout == "tensor":  # both workers compute the loss, so that none of them is wrong alone
        assert met == [0, 1]
        assert re.fullmatch(rf"training samples \[(\d+, )*{POISONED}(, \d+)*\]", str(where))
    else:
        rank = 1 if layout == "pipeline" else met[0]  # the last stage computes the loss
        assert where == f"training samples [{POISONED}] of worker {rank} on {socket.gethostname()}"
