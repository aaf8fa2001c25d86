"""Buckets of gradients: which elements each worker owns, and copies of parameters that some workers share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rapidformer_templates.engines.parallel import buckets
from rapidformer_templates.engines.parallel.replicas import ShardedGradients, TrainedParameter
from rapidformer_templates.engines.shards import Copies
from rapidformer_templates.switches.layout.experts import TokenDispatcher
from tests.support.worker_pool import run_in_workers


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=8), ranks=st.integers(1, 5), limit=st.integers(1, 30))
def test_every_element_is_in_one_bucket_and_has_one_owner(sizes: list[int], ranks: int, limit: int) -> None:
    found = buckets.split_into_buckets(list(enumerate(sizes)), ranks, limit)
    covered = [(s.parameter, s.start + i) for w in found for s in w.segments for i in range(s.length)]
    assert covered == [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    owned = []
    for bucket in found:
        for rank in range(ranks):
            end = 0
            for (parameter, start, length), place in bucket.owned(rank):
                assert place == end, "runs lie end to end in a share"
                end = place + length
                owned += [(parameter, start + i) for i in range(length)]
            assert end <= bucket.share
    assert owned == covered
    assert sum(w.share * ranks - w.length for w in found) < ranks, "only the last bucket is padded"


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 30))
def test_chunks_are_whole_parameters_up_to_a_limit(sizes: list[int], limit: int) -> None:
    found = buckets.update_chunks(sizes, limit)
    assert [place for chunk in found for place in chunk] == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in chunk) <= limit or len(chunk) == 1 for chunk in found)
    following = [sizes[after[0]] for after in found[1:]]
    assert all(
        sum(sizes[place] for place in chunk) + size > limit for chunk, size in zip(found, following, strict=False)
    )


def test_a_bucket_is_a_matrix_of_the_model() -> None:
    widths = (16, 768, 2048, 8192)
    assert [buckets.bucket_size_for(width, "cpu") for width in widths] == [2**18, 768**2, 2048**2, 2**23]
    assert {buckets.bucket_size_for(width, "cuda") for width in widths} == {2**23}


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=12), ranks=st.integers(1, 5), limit=st.integers(1, 60))
def test_whole_parameters_have_one_owner_each_and_even_loads(sizes: list[int], ranks: int, limit: int) -> None:
    loads = [0] * ranks
    found = buckets.assign_whole_parameters(list(enumerate(sizes)), loads, limit)
    owned = {rank: [run for w in found for run, _ in w.owned(rank)] for rank in range(ranks)}
    everything = [(run.parameter, run.start, run.length) for runs in owned.values() for run in runs]
    assert sorted(everything) == [(index, 0, size) for index, size in enumerate(sizes)]
    assert loads == [sum(run.length for run in owned[rank]) for rank in range(ranks)]
    assert loads == [sum(w.share_of(rank) for w in found) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max((w.length for w in found), default=0)
    assert sum(w.packed for w in found) == sum(sizes), "nothing is padded"


def test_copies_in_several_stages_have_one_owner_whatever_else_a_stage_has() -> None:
    tied = [(0, 30), (1, 20)]

    def owners(others: list[tuple[int, int]]) -> list[int | None]:
        kinds = {"own": others, "tied": tied}
        found = buckets.buckets_by_key(kinds, 10, ranks=lambda kind: 2, whole=True, is_tied=lambda kind: kind == "tied")
        return [bucket.owner for bucket, kind in found.items() if kind == "tied"]

    assert owners([(2, 50)]) == owners([(2, 5), (3, 60), (4, 7)]) == [0, 1]


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
