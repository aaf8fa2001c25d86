"""FSDP inside groups of workers equals the run of one process, with copies that stay equal to the bit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rapidformer_templates.engines import local
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.switch import Measured
from tests.support import combinations, engine_runs
from tests.support.collectives import GATHER, REDUCE, SUM, count_collectives
from tests.support.engine_runs import SAVED
from tests.support.jobs import CausalJob
from tests.support.parity import EXACT, assert_close, assert_follows, observed, reference, train
from tests.support.requests import config_of
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

STEPS = "--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"
MICRO = "--micro-batch-size 1"  # with four workers: two micro batches per step
PAIR = "--fsdp-shard-size 2"
HYBRID = f"{MICRO} --fsdp-memory-optimization {PAIR}"
AVERAGED = "--ema-decay 0.9"
BF16 = "--mixed-precision bf16 --checkpoint-activations"
BRANCHES = "--micro-batch-size 4 --fsdp-memory-optimization --fsdp-shard-size 2"
OTHERS = {"all workers": ("fsdp", "--fsdp-shard-size 4"), "copies": ("plain", "")}
"""Engines that continue from a checkpoint of hybrid sharding, with their flags."""
GROUPS = 3  # the model's two blocks, and the root with the rest


def _norm_of_the_second_copy() -> Any:
    """Change the norm of the second copy. Its workers sum in another order, which changes the last bits of the norm."""
    norm = local.get_total_norm

    def rounded(*given: Any, **named: Any) -> Any:
        return norm(*given, **named) * (1 + 1e-6 * (dist.get_rank() >= 2))

    return mock.patch.object(local, "get_total_norm", rounded)


def _count() -> dict[str, Any]:
    """Return the collectives of the second step by name and group size, and the receipts after two steps."""
    job = CausalJob([*f"{STEPS} --train-iters 2 {HYBRID}".split(), "--lr", "1e-3"])
    with _norm_of_the_second_copy():
        run, seen = count_collectives(job)
    return {"counted": seen[2][0], "rounded": run["summary"]["receipts"]}


def _all_runs(workers: Any, folder: str) -> dict[str, Any]:
    """Train in each of four workers."""
    runs = _count()
    runs["bf16"] = train("causal", False, f"{STEPS} {HYBRID} {BF16}", "--save", f"{folder}/bf16")
    runs["branches"] = combinations.train(workers, "Trainer", BRANCHES.split(), "branches")
    return runs | _resumed(workers, folder)


def _resumed(workers: Any, folder: str) -> dict[str, Any]:
    """Return the curves of an uninterrupted run, of one that resumes, and of other engines that continue from it."""
    whole = engine_runs.run(f"{folder}/whole", "fsdp", 4, *PAIR.split())
    died = f"{folder}/died"
    engine_runs.run(died, "fsdp", 4, *PAIR.split(), dies_after=SAVED + 1)
    cases = {"again": ("fsdp", PAIR), **OTHERS}
    if workers.is_main:
        for name in cases:
            shutil.copytree(died, f"{folder}/{name}")
    workers.barrier()
    curves = {
        name: engine_runs.run(f"{folder}/{name}", engine, 4, "--resume", *flags.split())
        for name, (engine, flags) in cases.items()
    }
    return {"whole": whole, **curves}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(folder: str) -> dict[str, Any]:
    return run_in_workers(4, _all_runs, folder)[0]


def test_groups_follow_one_process() -> None:
    """Compare clipped steps of two micro batches each in fp64, and evaluations of averaged weights."""
    expected = reference("causal", True, f"{STEPS} --micro-batch-size 8 {AVERAGED}")
    assert all(norm > 0.1 for _, norm in expected["curve"]), "so that clipping acts"
    actual = observed(4, "causal", True, f"{STEPS} {HYBRID} {AVERAGED}")[0]
    assert_follows(actual, expected, *EXACT)
    _assert_shares_and_copies(actual["summary"]["receipts"])


def _assert_shares_and_copies(receipts: Any) -> None:
    assert (receipts["copies"], receipts["copies_equal"]) == (2, True)
    assert len(receipts["held_bytes_by_rank"]) == 4
    for held in receipts["held_bytes_by_rank"]:
        assert held["parameter_bytes"] == pytest.approx(receipts["parameter_bytes_whole"] / 2, rel=0.02)


def test_groups_follow_one_process_in_bf16(runs: Any) -> None:
    expected = reference("causal", False, f"{STEPS} --micro-batch-size 8 --mixed-precision bf16")
    assert_close(runs["bf16"]["curve"], expected["curve"], 2**-8, 0)
    _assert_shares_and_copies(runs["bf16"]["summary"]["receipts"])


def test_what_some_copies_do_not_reach_counts_as_zero(runs: Any) -> None:
    flags = ["--micro-batch-size", "16", "--global-batch-size", "16"]
    expected = combinations.train(None, "Trainer", flags, "branches")
    assert combinations.distance(runs["branches"], expected).worst < 1e-5


def test_parameters_travel_inside_groups_and_gradients_of_shards_between_them_once_a_step(runs: Any) -> None:
    gathers = 2 * (2 * GROUPS - 1)  # for two micro batches, with a root that stays whole between forward and backward
    in_pairs = {name: count for (name, size), count in runs["counted"].items() if size == 2}
    assert in_pairs == {GATHER: gathers, REDUCE: 2 * GROUPS, SUM: GROUPS}


def test_copies_stay_equal_where_their_groups_add_up_in_other_orders(runs: Any) -> None:
    assert runs["rounded"]["copies_equal"] is True


def test_a_run_goes_on_bitwise_and_in_other_layouts(runs: Any, folder: str, tmp_path: Path) -> None:
    assert runs["again"] == runs["whole"][SAVED:]
    reference = engine_runs.run(str(tmp_path / "reference"), "plain", 1)
    torch.testing.assert_close(torch.tensor(runs["whole"]), torch.tensor(reference), rtol=1e-5, atol=1e-6)
    shutil.copytree(f"{folder}/died", tmp_path / "one")
    curves = {name: runs[name] for name in OTHERS} | {
        "one": engine_runs.run(str(tmp_path / "one"), "plain", 1, "--resume")
    }
    for curve in curves.values():
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(reference[SAVED:]), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_has_one_copy_that_all_groups_write(runs: Any, folder: str) -> None:
    (checkpoint,) = Path(folder, "whole", "checkpoints").glob(f"step-{SAVED}")
    index = json.loads((checkpoint / "index.json").read_text())
    for kind in ("weights", "optimizer"):
        files = set()
        for name, entry in index[kind].items():
            offsets = [tuple(offset) for _, _, offset in entry["boxes"]]
            assert len(offsets) == len(set(offsets)), name
            assert len(offsets) == (2 if math.prod(entry["shape"]) > 1 else 1), name
            files |= {file for file, _, _ in entry["boxes"]}
        assert len(files) == 4, "each worker writes"


def test_the_export_has_one_copy(runs: Any, folder: str) -> None:
    exported = load_file(f"{folder}/bf16/export/model.safetensors")
    assert exported
    for name, weight in exported.items():
        torch.testing.assert_close(weight.double(), runs["bf16"]["weights"][name], rtol=0, atol=0)


ACTED = [  # (elements that each of four workers updates of the ten that are trained, copies equal, message)
    ((5, 5, 5, 5), True, None),
    ((6, 4, 6, 4), True, None),
    ((3, 3, 2, 2), True, "2 copies of shares for 2 workers were expected; the workers have 10 elements together"),
    ((10, 10, 10, 10), True, "2 copies of shares for 2 workers were expected; the workers have 40 elements together"),
    ((5, 5, 5, 5), False, "2 equal copies were expected; after an update they differ"),
]


@pytest.mark.parametrize(("updated", "equal", "said"), ACTED)
def test_the_first_step_shows_how_many_copies_there_are(
    updated: tuple[int, ...], equal: bool, said: str | None
) -> None:
    config = REGISTRY.complete(config_of(f"--fsdp-memory-optimization {PAIR}"))
    ranks = [{"updated_elements": count, "trained_elements": 10, "copies_equal": equal} for count in updated]
    plan = Plan("Trainer", ("fsdp", "hybrid-sharding"), Sizes(world=4, local_world=4, data=4))
    found = REGISTRY["hybrid-sharding"].acted(Measured(plan, config, ranks))
    assert found == said if said is None else str(found).startswith(said)
