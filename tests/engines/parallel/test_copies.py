"""Gradients of parameters that some workers share as copies, and of a parameter that a single worker reaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines.parallel.replicas import ShardedGradients, TrainedParameter
from rapidformer_templates.engines.shards import Copies
from rapidformer_templates.switches.layout.experts import TokenDispatcher
from tests.support.worker_pool import run_in_workers

SIZE = 8
"""Rows and columns of each matrix. A bucket has room for one matrix."""


def _matrices() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    names = ("before", "expert", "after", "branch")
    return {name: nn.Parameter(torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64)) for name in names}


def _rows(rank: int) -> torch.Tensor:
    return torch.arange(3 * SIZE, dtype=torch.float64).view(3, SIZE).div(10).add(rank).cos()


def _loss(rank: int, of: dict[str, nn.Parameter], experts: Any) -> torch.Tensor:
    """Return the loss of a worker. Only the rows of the first worker use the branch."""
    rows = experts(_rows(rank) @ of["before"]) @ of["after"]
    return (rows @ of["branch"] if rank == 0 else rows).square().sum()


def _in_two_workers(workers: Any, shards: str | None) -> dict[str, torch.Tensor]:
    """Return the gradients of this worker's update. Each worker has sent its rows to the other one's expert."""
    of, rank = _matrices(), workers.rank
    copies = {name: Copies() if name == "expert" else Copies(2, rank) for name in of}
    trained = [TrainedParameter(name, parameter, copies[name]) for name, parameter in of.items()]
    shared = ShardedGradients(trained, workers, shards=shards, tied={}, bucket_size=SIZE * SIZE)
    dispatcher = TokenDispatcher(dist.new_group())
    there = [0, 3] if rank == 0 else [3, 0]

    def experts(rows: torch.Tensor) -> torch.Tensor:
        arrived = dispatcher.exchange(rows, there, there)
        return dispatcher.exchange(torch.tanh(arrived @ of["expert"]), there, there)

    shared.begin_backward(last=True)
    _loss(rank, of, experts).backward()
    shared.end_backward()
    shared.reduce()
    found: dict[str, torch.Tensor] = {}
    for _ in shared.iter_update_chunks(in_chunks=True):
        found |= {unit.of.name: unit.values.grad.clone().view(-1) for unit in shared.units}  # type: ignore[union-attr]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("shards", [None, "optimizer", "gradients"])
def test_nobody_waits_for_ever_where_one_worker_alone_reaches_a_parameter(shards: str | None) -> None:
    """The other worker sends its zeros only after a backward that needs the end of this worker's backward."""
    of, experts = _matrices(), [_matrices()["expert"] for _ in range(2)]
    losses = [_loss(rank, of, lambda rows, e=experts[1 - rank]: torch.tanh(rows @ e)) for rank in range(2)]
    torch.stack(losses).sum().backward()
    for rank, found in enumerate(run_in_workers(2, _in_two_workers, shards)):
        for name, parameter in {**of, "expert": experts[rank]}.items():
            assert parameter.grad is not None
            wanted = parameter.grad.view(-1)
            own = wanted.chunk(2)[rank] if shards and name != "expert" else wanted
            torch.testing.assert_close(found[name], own, rtol=1e-12, atol=1e-12)


def _in_two_stages(workers: Any) -> list[torch.Tensor]:
    """Return the gradients of a tied parameter on this stage. Only the first stage uses it."""
    parameter = nn.Parameter(torch.arange(4.0).view(2, 2))
    stage: Any = SimpleNamespace(copies=1, mesh=None)
    trained = [TrainedParameter("tied", parameter, Copies(), (0, 1))]
    shared = ShardedGradients(trained, stage, shards=None, tied={(0, 1): dist.new_group()}, bucket_size=4)
    shared.begin_backward(last=True)
    if workers.rank == 0:
        parameter.square().sum().backward()
    shared.end_backward()
    shared.reduce()
    found: list[torch.Tensor] = []
    for _ in shared.iter_update_chunks(in_chunks=True):
        found += [unit.values.grad.clone().view(-1) for unit in shared.units if unit.values.grad is not None]
    return found


@pytest.mark.distributed
def test_a_tied_parameter_that_one_stage_uses_is_updated_in_both() -> None:
    """Otherwise the copies would differ after the step."""
    for found in run_in_workers(2, _in_two_stages):
        torch.testing.assert_close(found, [2 * torch.arange(4.0)])
