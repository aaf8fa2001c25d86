"""The content of accepted plans: single facts, groups of workers, and reviewed plans of many commands."""

import itertools
import json

import pytest
import torch

from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.plan import Sizes, groups_of
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.system.workers import Workers
from tests.support import golden_plans
from tests.support.requests import CPU, GPUS, config_of, on


@pytest.mark.parametrize(
    ("flags", "place", "precision"),
    [
        ("--mixed-precision", CPU, "bf16"), ("--mixed-precision", GPUS, "fp16"),
        ("--mixed-precision bf16", GPUS, "bf16"), ("--mixed-precision fp16", CPU, "fp16"), ("--tf32", GPUS, "fp32"),
    ],
)  # fmt: skip
def test_precision(flags: str, place: Environment, precision: str) -> None:
    plan = resolve(config_of(flags), place)
    assert plan.precision == precision
    chosen = any(note.startswith("--mixed-precision without a type") for note in plan.notes)
    assert chosen == (flags == "--mixed-precision")


@pytest.mark.parametrize(
    ("flags", "place", "implementation"),
    [
        ("", CPU, "torch.optim.AdamW (fused)"),
        ("", GPUS, "torch.optim.AdamW (fused)"),
        ("--optimizer apex_adam", CPU, "torch.optim.AdamW (fused)"),
        ("--optimizer apex_adam", on(CPU, packages={"apex": "1"}), "torch.optim.AdamW (fused)"),
        ("--optimizer apex_adam", GPUS, "apex.optimizers.FusedAdam"),
        ("--optimizer apex_adam --fsdp-memory-optimization", GPUS, "torch.optim.AdamW (fused)"),
        ("--optimizer apex_lamb", CPU, "rapidformer_templates.switches.optimizer.updates.Lamb"),
        ("--optimizer apex_lamb", GPUS, "apex.optimizers.FusedLAMB"),
        ("--optimizer adafactor", CPU, "torch.optim.Adafactor"),
        ("--optimizer muon", CPU, "rapidformer_templates.switches.optimizer.updates.Muon"),
        ("--optimizer lion", CPU, "rapidformer_templates.switches.optimizer.updates.Lion"),
    ],
)
def test_stand_ins_are_noted(flags: str, place: Environment, implementation: str) -> None:
    plan = resolve(config_of(flags), place)
    assert plan.optimizer_implementation == implementation
    noted = any(f"{implementation} is used instead" in note for note in plan.notes)
    assert noted == (plan.optimizer.startswith("apex") and not implementation.startswith("apex"))


def test_notes_for_sizes_that_act_as_none_or_badly() -> None:
    plan = resolve(config_of("--fsdp-memory-optimization --micro-batch-size 12"), Environment())
    assert "fsdp: one worker, so there is nothing to shard" in plan.notes
    assert (
        "micro batch 12: multiples of 8 suit the matrix units better (single-GPU guide of Transformers)" in plan.notes
    )
    assert resolve(config_of("--micro-batch-size 16"), GPUS).notes == ()


def test_an_unseen_gpu_is_noted() -> None:
    notes = resolve(config_of("--device cuda --tf32"), on(GPUS, compute_capability=None)).notes
    assert any(note.startswith("no GPU is visible here") for note in notes)


def test_values_and_rules_are_written_down() -> None:
    plan = resolve(config_of("--tf32 --lr 3e-5 --data-path 0.3 A 0.7 B"), GPUS)
    assert "RF018" in plan.rules
    assert "RF002" not in plan.rules, "the rules of switches that are off have nothing to say"
    assert json.loads(json.dumps(plan.to_json()))["values"]["--data-path"]["value"] == ["0.3", "A", "0.7", "B"]


def test_switches_say_how_they_act() -> None:
    for switch in REGISTRY.switches:
        if switch.name != "auto-strategy":  # it acts before the run: the plan contains what it chose
            assert switch.receipt, f"{switch.name} leaves no receipt"


def test_plans_are_unchanged() -> None:
    """After a change that plans should show, run ``python -m tests.support.golden_plans`` and read the difference."""
    golden = json.loads(golden_plans.FILE.read_text(encoding="utf-8"))
    plans = dict(golden_plans.plans())
    assert plans.keys() == golden.keys()
    assert {name for name in plans if plans[name] != golden[name]} == set()
    assert sum("engine" not in plan for plan in plans.values()) <= 5


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
