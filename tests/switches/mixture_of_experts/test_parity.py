"""A mixture follows its one-process run under every engine: loss, gradient norm, weights. It resumes under another."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from tests.support import mixtures, parity
from tests.support.parity import assert_close, assert_follows
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

MIXTURE = "--num-experts 4 --moe-loss-coeff 2.5 --moe-z-loss-coeff 0.5"
STEPS = "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
SAVED = ("--save-interval", "2", "--keep-checkpoints", "2", "--save")
CASES = {  # name: (job, flags of the mixture)
    "dropless": ("causal", MIXTURE),
    "capacity": ("masked", f"{MIXTURE} --moe-capacity-factor 1.0 --moe-top-k 1"),
    "gentle": ("causal", "--num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"),  # in the range of fp16
    "own": ("mixtral", "--moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"),
}
ALONE = "--micro-batch-size 8"
LAYOUTS = {
    "ddp": "--micro-batch-size 2",
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization --checkpoint-activations",
    "oss": "--micro-batch-size 4 --oss-memory-optimization",
    "sdp": "--micro-batch-size 2 --oss-sdp-memory-optimization",
    "zero-1": "--micro-batch-size 4 --zero-1-memory-optimization",
    "zero-2": "--micro-batch-size 2 --zero-2-memory-optimization",
    "zero-3": "--micro-batch-size 4 --zero-3-memory-optimization",
    "distributed-optimizer": "--micro-batch-size 2 --use-distributed-optimizer",
    "experts": "--micro-batch-size 2 --expert-parallel",
    "experts-checkpointed": "--micro-batch-size 4 --expert-parallel --checkpoint-activations",
}
RUNS = {
    f"{case} {layout}": (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if case == "dropless" or layout in {"capacity": ("fsdp", "experts"), "own": ("ddp", "zero-2")}.get(case, ())
}
LONGER = {
    *(f"dropless {layout}" for layout in ("fsdp", "oss", "sdp", "zero-1", "zero-2", "zero-3")),
    "dropless distributed-optimizer",
    "dropless experts-checkpointed",
    "capacity fsdp",
    "own ddp",
}
"""For ``make test-longer``. The covering table contains mixtures under every engine."""
RESUMED = ("fsdp", "experts")
COMPARED = ("dropless ddp", "dropless experts")
"""Runs that other tests read."""
HALF_PRECISION = {"fp16": "", "bf16-zero-2": "--zero-2-memory-optimization", "bf16-experts": "--expert-parallel"}


def _train(case: str, flags: str, *more: str) -> parity.Trained:
    job, mixture = CASES[case]
    return parity.train(job, False, f"{STEPS} {mixture} {flags}", *more)


def _forget_last_step(folder: str) -> None:
    """Make a run look as if it had ended between its two checkpoints."""
    shutil.rmtree(f"{folder}/checkpoints/step-3")


def _in_two_workers(workers: Any, folder: str, names: list[str], resumed: list[str], half: list[str]) -> dict[str, Any]:
    runs = {}
    for case, layout in map(RUNS.__getitem__, names):
        saved = [*SAVED, f"{folder}/{layout}"] if case == "dropless" and layout in RESUMED else []
        runs[f"{case} {layout}"] = _train(case, LAYOUTS[layout], *saved)
    for layout in resumed:
        more = (*SAVED, f"{folder}/alone, then {layout}", "--resume")
        runs[f"alone → {layout}"] = _train("dropless", LAYOUTS[layout], *more)
    for name in half:
        flags = f"--micro-batch-size 4 --mixed-precision {name[:4]} {HALF_PRECISION[name]}"
        runs[name] = _train("gentle", flags)
    return runs


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs. One group of workers trains the runs of two workers."""
    folder = tmp_path_factory.mktemp("mixtures")
    found: dict[str, Any] = {f"{case} alone": _train(case, ALONE) for case in CASES if case != "dropless"}
    found["dropless alone"] = _train("dropless", ALONE, *SAVED, f"{folder}/alone")
    unbalanced = "--num-experts 4 --moe-loss-coeff 0 --moe-z-loss-coeff 0"
    found["plain"] = parity.train("causal", False, f"{STEPS} {ALONE} {unbalanced}")
    _forget_last_step(f"{folder}/alone")
    resumed, half = selected(request, "layout"), selected(request, "half")
    for layout in resumed:
        shutil.copytree(folder / "alone", folder / f"alone, then {layout}")
    names = sorted({*selected(request, "run"), *COMPARED, *(f"dropless {layout}" for layout in resumed)})
    found |= run_in_workers(2, _in_two_workers, str(folder), names, resumed, half)[0]
    for layout in resumed:
        _forget_last_step(f"{folder}/{layout}")
        found[f"{layout} → alone"] = _train("dropless", ALONE, *SAVED, f"{folder}/{layout}", "--resume")
    return found


@pytest.mark.parametrize("run", by_default(RUNS.keys() - LONGER, RUNS))
def test_layout_follows_one_process(run: str, runs: Any) -> None:
    expected, actual = runs[f"{RUNS[run][0]} alone"], runs[run]
    assert_follows(actual, expected)
    for key in ("expert_load", "dropped_choices"):
        assert actual["summary"]["receipts"][key] == expected["summary"]["receipts"][key]
    balance = [mixtures.losses_of(each["lines"]) for each in (actual, expected)]
    assert len(balance[1]) == len(expected["curve"]) == 3
    assert len(expected["evaluations"]) == 2
    assert_close(*balance)


def test_the_mixture_acts(runs: Any) -> None:
    """Otherwise it would be easy to agree: the losses change the gradient, choices are dropped, and each run learns."""
    assert runs["plain"]["curve"][0][0] == runs["dropless alone"]["curve"][0][0]  # the loss contains only the task
    assert abs(runs["plain"]["curve"][0][1] / runs["dropless alone"]["curve"][0][1] - 1) > 0.01
    assert runs["capacity alone"]["summary"]["receipts"]["dropped_choices"] > 0
    assert runs["dropless alone"]["summary"]["receipts"]["dropped_choices"] == 0
    line = next(line for line in runs["dropless alone"]["lines"] if "loss" in line)
    assert 1.0 < line["balance_loss"] < 4
    assert line["z_loss"] > 0
    assert line["expert_load_min"] < 1 < line["expert_load_max"]


@pytest.mark.parametrize("layout", by_default(["experts"], RESUMED))
def test_checkpoints_go_from_one_layout_to_another(layout: str, runs: Any) -> None:
    expected = runs["dropless alone"]
    for name in (f"alone → {layout}", f"{layout} → alone"):
        assert_close(runs[name]["curve"], expected["curve"][2:])
        for key, weight in expected["weights"].items():
            assert_close(runs[name]["weights"][key], weight)


def test_workers_hold_their_share_of_the_experts(runs: Any) -> None:
    held = runs["dropless experts"]["summary"]["receipts"]["held_bytes_by_rank"]
    whole = runs["dropless ddp"]["summary"]["receipts"]["held_bytes_by_rank"]
    experts = sum(w.numel() for name, w in runs["dropless alone"]["weights"].items() if ".experts." in name) * 4
    for mine, all_of_it in zip(held, whole, strict=True):
        assert mine["parameter_bytes"] == all_of_it["parameter_bytes"] - experts // 2
        assert mine["optimizer_state_bytes"] < all_of_it["optimizer_state_bytes"] - 0.9 * experts


@pytest.mark.parametrize("half", by_default(["fp16"], HALF_PRECISION))
def test_half_precision(half: str, runs: Any) -> None:
    actual, expected = (torch.tensor(runs[run]["curve"]) for run in (half, "gentle alone"))
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=0)
