"""Groups of workers, compared with the ranks of the workers themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from rapidformer_templates.planning.plan import Sizes, groups_of
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.system.workers import Workers
from tests.support.requests import CPU, config_of, on


def _ranks(rank: int, sizes: Sizes) -> tuple[int, ...]:
    place = Workers(rank, 0, sizes.world, torch.device("cpu"), sizes.tensor, sizes.pipeline, context=sizes.context)
    assert place.copy_rank == place.data_rank * place.context + place.context_rank
    return place.tensor_rank, place.context_rank, place.data_rank, place.pipeline_rank


@pytest.mark.parametrize("local", [1, 2, 3, 4, 8, 24])
@pytest.mark.parametrize(
    ("tensor", "context", "data", "pipeline"), list(itertools.product([1, 4], [1, 2], [1, 3], [1, 2]))
)
def test_groups_are_those_of_the_workers(tensor: int, context: int, data: int, pipeline: int, local: int) -> None:
    sizes = Sizes(tensor * context * data * pipeline, local, tensor, pipeline, data, context=context)
    by_rank = {rank: _ranks(rank, sizes) for rank in range(sizes.world)}
    found = {group.name: group for group in groups_of(sizes)}
    for dimension, name in enumerate(("tensor", "context", "data", "pipeline")):
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, ranks in by_rank.items():
            members.setdefault(ranks[:dimension] + ranks[dimension + 1 :], []).append(rank)
        if len(members[0, 0, 0]) == 1:
            assert name not in found
            continue
        group = found[name]
        assert [i * group.stride for i in range(group.size)] == members[0, 0, 0]
        assert group.nodes == max(len({rank // local for rank in ranks}) for ranks in members.values())


@pytest.mark.parametrize(
    ("world", "local", "size", "shards", "copies", "noted"),
    [(8, 4, 4, 1, 2, False), (8, 4, 2, 1, 2, False), (12, 6, 4, 2, 2, True), (16, 4, 8, 2, 2, True)],
)
def test_a_plan_says_which_groups_of_hybrid_sharding_reach_over_nodes(
    world: int, local: int, size: int, shards: int, copies: int, noted: bool
) -> None:
    place = on(CPU, world_size=world, local_world_size=local)
    plan = resolve(config_of(f"--fsdp-memory-optimization --fsdp-shard-size {size}"), place)
    groups = {group.name: (group.size, group.stride, group.nodes) for group in plan.groups}
    assert groups["shards"] == (size, 1, shards)
    assert groups["copies"] == (world // size, size, copies)
    note = f"hybrid-sharding: groups of {size} span nodes of {local} workers, where gathering parameters is slow"
    assert (note in plan.notes) is noted


def test_one_group_of_all_workers_is_said_to_be_plain() -> None:
    plan = resolve(config_of("--fsdp-memory-optimization --fsdp-shard-size 4"), on(CPU, world_size=4))
    assert "hybrid-sharding: one group of all 4 workers, as without --fsdp-shard-size" in plan.notes
    assert "copies" not in {group.name for group in plan.groups}
