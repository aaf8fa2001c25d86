"""Runs with divided sequences follow the one-process run: loss, gradient norm, weights, evaluations and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parallel_jobs import begin, train_all
from tests.support.parity import Trained, reference
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

STEPS = "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
CONTEXT, TENSOR, PIPELINE = (
    f"--{name}-size" for name in ("context-parallel", "tensor-model-parallel", "pipeline-model-parallel")
)
RING = "--context-parallel-kind ring"
# (job, double precision, flags), each with four workers, on padded batches whose lengths they do not divide.
CASES = {
    "cp2-dp2-zero-2": ("gpt2-4-tied", True, f"{CONTEXT} 2 --micro-batch-size 2 --zero-2-memory-optimization"),
    "cp4-distributed-optimizer": (
        "llama-4-untied",
        True,
        f"{CONTEXT} 4 --micro-batch-size 4 --use-distributed-optimizer --checkpoint-activations",
    ),
    "cp2-dp2-selective": (
        "bert-4-untied",
        True,
        f"{CONTEXT} 2 --micro-batch-size 2 --checkpoint-activations --recompute-granularity selective",
    ),
    "tp2-cp2": ("llama-4-tied", True, f"{CONTEXT} 2 {TENSOR} 2 --micro-batch-size 4 --sequence-parallel"),
    "cp2-pp2-interleaved": (
        "neox-8-untied",
        True,
        f"{CONTEXT} 2 {PIPELINE} 2 --virtual-pipeline-size 2 --micro-batch-size 2 --use-flash-attn",
    ),
    "cp2-pp2-own-loss": ("own-loss", True, f"{CONTEXT} 2 {PIPELINE} 2 --micro-batch-size 2"),
    "ring4": ("llama-4-untied", True, f"{CONTEXT} 4 {RING} --micro-batch-size 4 --checkpoint-activations"),
    "ring2-tp2": ("gpt2-4-tied", True, f"{CONTEXT} 2 {TENSOR} 2 --micro-batch-size 4 --zero-1-memory-optimization"),
    "ring2-pp2": ("bert-4-untied", True, f"{CONTEXT} 2 {RING} {PIPELINE} 2 --micro-batch-size 2"),
    "ring2-own-loss": ("own-loss", True, f"{CONTEXT} 2 {RING} --micro-batch-size 2 --zero-2-memory-optimization"),
    "cp2-pp2-fused": (
        "llama-4-untied",
        True,
        f"{CONTEXT} 2 {PIPELINE} 2 --micro-batch-size 2 --fused-linear-cross-entropy",
    ),
    "cp2-fsdp4": ("gpt2-4-tied", True, f"{CONTEXT} 2 --micro-batch-size 2 --fsdp-memory-optimization"),
    "tp2-cp2-fused": (
        "llama-4-tied",
        True,
        f"{CONTEXT} 2 {TENSOR} 2 --micro-batch-size 4 --sequence-parallel --fused-linear-cross-entropy",
    ),
    "bf16": ("llama-4-untied", False, f"{CONTEXT} 2 --micro-batch-size 2 --mixed-precision bf16"),
}
LONGER = {
    "cp4-distributed-optimizer",
    "tp2-cp2",
    "cp2-dp2-selective",
    "cp2-pp2-interleaved",
    "ring2-pp2",
    "cp2-pp2-own-loss",
    "ring4",
    "ring2-own-loss",
    "cp2-pp2-fused",
    "cp2-fsdp4",
    "tp2-cp2-fused",
}
"""For ``make test-longer``. The covering table also contains these pairs of switches."""
WITH_RECEIPTS = {"cp2-dp2-zero-2": 2, "cp4-distributed-optimizer": 4, "tp2-cp2": 2}
"""Cases whose receipts are read, with the size of the context."""
RESUMED = "--train-iters 6 --save-interval 2 --global-batch-size 8 --clip-grad 0.1 --no-export-model --lr 1e-3"
CHAIN = (
    (f"--micro-batch-size 2 {CONTEXT} 2 --zero-2-memory-optimization", 3),
    (f"--micro-batch-size 2 {CONTEXT} 2 {PIPELINE} 2 --resume", 5),
)


def _whole(flags: str) -> str:
    """Return the flags of one process with micro batches of the same size."""
    words = flags.split()
    size = words[words.index("--micro-batch-size") + 1]
    return f"{STEPS} --micro-batch-size {size}{' --mixed-precision bf16' if 'bf16' in words else ''}"


def _go_on(folder: str) -> list[tuple[float, float]]:
    """Return the curve of a run that dies and resumes in another layout. Each part begins one step before the death."""
    curve: list[tuple[float, float]] = []
    for flags, dies_after in CHAIN:
        curve = [*curve[:-1], *begin("gpt2-8-tied", folder, f"{RESUMED} {flags}", dies_after)]
    return curve


def _four_workers(workers: Any, folder: str, names: list[str]) -> dict[str, Any]:
    cases = {name: (CASES[name][0], CASES[name][1], f"{STEPS} {CASES[name][2]}") for name in names}
    return train_all(workers, cases) | {"resumed": _go_on(f"{folder}/chain")}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("context"))
    names = sorted({*selected(request, "name"), "ring2-tp2", "bf16"})
    return {**run_in_workers(4, _four_workers, folder, names)[0], "folder": folder}


@pytest.fixture(scope="module")
def references(runs: dict[str, Any]) -> dict[str, Trained]:
    cases = {name: case for name, case in CASES.items() if name in runs}
    return {name: reference(job, double, _whole(flags)) for name, (job, double, flags) in cases.items()}


@pytest.mark.parametrize("name", by_default(CASES.keys() - LONGER, [name for name, case in CASES.items() if case[1]]))
def test_divided_sequences_follow_one_process(name: str, runs: Any, references: Any) -> None:
    actual, expected = runs[name], references[name]
    for key in ("curve", "evaluations"):
        found, wanted = (torch.tensor(run[key], dtype=torch.float64) for run in (actual, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert actual["weights"].keys() == expected["weights"].keys()
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][weight], value, rtol=1e-10, atol=1e-12)


def test_the_references_learn_and_are_clipped(references: Any) -> None:
    """A constant curve would agree with anything."""
    for run in references.values():
        assert len({loss for loss, _ in run["curve"]}) == 3
        assert max(norm for _, norm in run["curve"]) > 0.2


def test_bf16_follows_one_process_within_its_rounding(runs: Any, references: Any) -> None:
    found, wanted = (torch.tensor(run["bf16"]["curve"]) for run in (runs, references))
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", by_default(WITH_RECEIPTS.keys() - LONGER, WITH_RECEIPTS))
def test_receipts_show_the_shards(name: str, runs: Any) -> None:
    receipts = runs[name]["summary"]["receipts"]
    held, whole = receipts["context_tokens"]
    assert held == -(-whole // WITH_RECEIPTS[name])
    assert receipts["context_attention"] is True
    assert receipts["context_kind"] == "all-to-all"


def test_a_receipt_shows_the_ring(runs: Any) -> None:
    assert runs["ring2-tp2"]["summary"]["receipts"]["context_kind"] == "ring"  # one head on each worker


def test_a_run_goes_on_in_any_layout_and_in_one_process(runs: Any, tmp_path: Path) -> None:
    whole = begin("gpt2-8-tied", str(tmp_path / "whole"), f"{RESUMED} --micro-batch-size 8")
    end = begin("gpt2-8-tied", f"{runs['folder']}/chain", f"{RESUMED} --micro-batch-size 2 --resume")
    curve = torch.tensor([*runs["resumed"][:-1], *end])
    torch.testing.assert_close(curve, torch.tensor(whole), rtol=1e-5, atol=1e-6)
