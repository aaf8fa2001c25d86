"""Adapters follow one process under every engine that divides a model, and move between all engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import OTHERS
from tests.support.parallel_jobs import begin, train_all
from tests.support.parity import reference
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LORA = "--lora-rank 3 --lora-alpha 24"
STEPS = f"--train-iters 4 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --no-export-model {LORA}"
LAYOUTS = {
    "tp2-pp2": ("gpt2-4-tied", True, f"--micro-batch-size 4 {TENSOR} {PIPELINE}"),
    "tp2-dp2-sequence": ("llama-4-tied", False, f"--micro-batch-size 4 {TENSOR} --sequence-parallel"),
    "tp2-dp2-zero-2": ("bert-4-untied", True, f"--micro-batch-size 2 {TENSOR} --zero-2-memory-optimization"),
    "pp2-dp2": ("neox-4-untied", True, f"--micro-batch-size 2 {PIPELINE} --use-distributed-optimizer"),
    "dp4-rslora": ("gpt2-4-tied", True, "--micro-batch-size 2 --lora-variant rslora --fsdp-memory-optimization"),
    "dp4-dora": ("gpt2-4-tied", True, "--micro-batch-size 2 --lora-variant dora --fsdp-memory-optimization"),
}
RESUMED = f"--train-iters 10 --save-interval 2 --global-batch-size 8 --lr 1e-2 --no-export-model {LORA}"
LAST = "--micro-batch-size 2 --resume"
CHAINS = {
    "gpt2-8-double": (
        (f"--micro-batch-size 4 {TENSOR} {PIPELINE}", 3),
        ("--micro-batch-size 2 --fsdp-memory-optimization --resume", 5),
        ("--micro-batch-size 2 --use-distributed-optimizer --resume", 7),
        (f"--micro-batch-size 4 {PIPELINE} --resume", 9),
    ),
    "gpt2-8-tied": (
        ("--micro-batch-size 2 --fsdp-memory-optimization", 3),
        ("--micro-batch-size 2 --zero-3-memory-optimization --resume", 5),
        ("--micro-batch-size 1 --zero-1-memory-optimization --resume", 7),
        ("--micro-batch-size 2 --oss-memory-optimization --resume", 9),
    ),
}
OTHERS["gpt2-8-double"] = type("Double", (OTHERS["gpt2-8-tied"],), {"double": True})


LONGER = {"tp2-dp2-sequence", "tp2-dp2-zero-2", "pp2-dp2", "dp4-dora", "dp4-rslora", *CHAINS}
"""For ``make test-longer``."""


def _whole(case: tuple[str, bool, str]) -> tuple[str, bool, str]:
    """Return the same case in one process, with micro batches of the same size."""
    words = case[2].split()
    variant = f"--lora-variant {words[words.index('--lora-variant') + 1]}" if "--lora-variant" in words else ""
    size = words[words.index("--micro-batch-size") + 1]
    return case[0], case[1], f"{STEPS} --micro-batch-size {size} {variant}"


def _four_workers(workers: Any, folder: str, layouts: list[str], chains: list[str]) -> dict[str, Any]:
    cases = {name: (LAYOUTS[name][0], LAYOUTS[name][1], f"{STEPS} {LAYOUTS[name][2]}") for name in layouts}
    runs = train_all(workers, cases)
    for job in chains:
        curve: list[tuple[float, float]] = []
        for flags, dies_after in CHAINS[job]:  # each part begins at the last checkpoint, one step before the death
            curve = [*curve[:-1], *begin(job, f"{folder}/{job}", f"{RESUMED} {flags}", dies_after)]
        runs[job] = curve
    return runs


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("layouts"))
    chosen = selected(request, "layout"), selected(request, "job")
    return {**run_in_workers(4, _four_workers, folder, *chosen)[0], "folder": folder}


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {name: reference(*_whole(LAYOUTS[name])) for name in selected(request, "layout")}


@pytest.mark.parametrize("layout", by_default(LAYOUTS.keys() - LONGER, LAYOUTS))
def test_layout_follows_one_process(layout: str, runs: Any, references: Any) -> None:
    found, wanted = runs[layout], references[layout]
    double = LAYOUTS[layout][1]
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if double else {"rtol": 1e-5, "atol": 1e-6}
    for key in ("curve", "evaluations"):
        torch.testing.assert_close(
            *(torch.tensor(run[key], dtype=torch.float64) for run in (found, wanted)), **tolerance
        )
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        assert "lora" in name
        torch.testing.assert_close(
            found["weights"][name], weight, **(tolerance if double else {"rtol": 1e-5, "atol": 1e-5})
        )
    counts = [run["summary"]["receipts"]["trained_parameters"] for run in (found, wanted)]
    assert 0 < counts[0] == counts[1]  # from all pipeline stages


def test_references_learn(references: Any) -> None:
    for run in references.values():
        assert len({loss for loss, _ in run["curve"]}) == 4
        assert len(run["evaluations"]) == 2
        assert all(float(weight.abs().sum()) > 0 for weight in run["weights"].values())


@pytest.mark.parametrize("job", by_default(CHAINS.keys() - LONGER, CHAINS))
def test_adapters_go_from_any_engine_to_any_other(job: str, runs: Any, tmp_path: Path) -> None:
    whole = begin(job, str(tmp_path / "whole"), f"{RESUMED} --micro-batch-size 8")
    curve = torch.tensor([*runs[job][:-1], *begin(job, f"{runs['folder']}/{job}", f"{RESUMED} {LAST}")])
    # Gradients of the first matrices start at zero, and Adam's first steps divide rounding by its own magnitude.
    limits = {"rtol": 1e-9, "atol": 1e-11} if job.endswith("double") else {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(curve, torch.tensor(whole), **limits)
