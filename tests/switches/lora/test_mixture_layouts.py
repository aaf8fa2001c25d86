"""Adapters in mixtures under every engine, beside one process; the experts whole on each worker, or divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import jobs, mixtures
from tests.support.worker_group import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = (
    "--train-iters 5 --eval-interval 5 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --optimizer adamw_torch --num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02 --lora-rank 3"
)
EVERYTHING, EXPERTS = "all-linear,experts,gate", "experts"
CONTEXT, PIPELINE, TENSOR, GROUPS = (
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2",
    "--expert-model-parallel-size 2",
)
LAYOUTS = {  # name: (kind, what has adapters, fp64, flags)
    "ddp": ("mixtral", EVERYTHING, True, "--micro-batch-size 1"),
    "fsdp": ("mixtral", EVERYTHING, True, "--micro-batch-size 1 --fsdp-memory-optimization --checkpoint-activations"),
    "oss-sdp": ("qwen3-moe", EVERYTHING, True, "--micro-batch-size 2 --oss-sdp-memory-optimization"),
    "zero-1": ("mixtral", EVERYTHING, False, "--micro-batch-size 2 --zero-1-memory-optimization"),
    "zero-2": ("mixtral", EVERYTHING, False, "--micro-batch-size 1 --zero-2-memory-optimization"),
    "zero-3": ("mixtral", EVERYTHING, False, "--micro-batch-size 1 --zero-3-memory-optimization"),
    "shards": ("mixtral", EVERYTHING, True, f"--micro-batch-size 2 {TENSOR} --zero-2-memory-optimization"),
    "stretches": ("qwen3-moe", EVERYTHING, True, f"--micro-batch-size 2 {TENSOR} --sequence-parallel"),
    "stages": ("mixtral", EVERYTHING, True, f"--micro-batch-size 1 {PIPELINE} --checkpoint-activations"),
    "stages, only experts": ("mixtral", EXPERTS, True, f"--micro-batch-size 1 {PIPELINE} --use-distributed-optimizer"),
    "stages and shards": ("qwen3-moe", EXPERTS, True, f"--micro-batch-size 2 {PIPELINE} {TENSOR}"),
    "context": ("mixtral", EVERYTHING, True, f"--micro-batch-size 2 {CONTEXT} --zero-1-memory-optimization"),
    "one expert each": ("mixtral", EVERYTHING, True, "--micro-batch-size 1 --expert-parallel"),
    "groups": ("qwen3-moe", EXPERTS, True, f"--micro-batch-size 1 {GROUPS} --checkpoint-activations"),
    "groups, states divided": (
        "mixtral", EVERYTHING, True, f"--micro-batch-size 2 {GROUPS} --zero-2-memory-optimization",
    ),
    "groups of shards": ("mixtral", EVERYTHING, True, f"--micro-batch-size 2 {TENSOR} --expert-parallel"),
    "groups, sharded": (
        "mixtral", EVERYTHING, True, f"--micro-batch-size 1 {GROUPS} --fsdp-memory-optimization",
    ),
    "groups, all sharded over four": (
        "qwen3-moe", EXPERTS, True, "--micro-batch-size 2 --expert-parallel --fsdp-memory-optimization",
    ),
    "groups of stretches of sequences": ("mixtral", EVERYTHING, True, f"--micro-batch-size 2 {CONTEXT} {GROUPS}"),
    "groups of stages": ("mixtral", EVERYTHING, True, f"--micro-batch-size 2 {PIPELINE} {GROUPS}"),
}  # fmt: skip


def _flags(layout: str) -> tuple[str, bool, str]:
    kind, targets, double, flags = LAYOUTS[layout]
    return f"{kind}-wide", double, f"{STEPS} --lora-target-modules {targets} {flags}"


def _in_four_workers(workers: Any, folder: str) -> dict[str, Any]:
    return {layout: jobs.train(*_flags(layout), f"{folder}/{layout}", lr="1e-2") for layout in LAYOUTS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    found = run_in_workers(4, _in_four_workers, str(folder))[0]
    return {**found, "folder": folder}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """One process, in one micro batch a step."""
    folder, found = tmp_path_factory.mktemp("whole"), {}
    for kind, targets, double in sorted({case[:3] for case in LAYOUTS.values()}):
        flags = f"{STEPS} --lora-target-modules {targets} --micro-batch-size 8"
        place = folder / str(len(found))
        run = jobs.train(f"{kind}-wide", double, flags, str(place), lr="1e-2")
        found[kind, targets, double] = {**run, "losses": mixtures.losses_of(place)}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_follows_one_process(layout: str, runs: Any, references: Any) -> None:
    found, wanted, double = runs[layout], references[LAYOUTS[layout][:3]], LAYOUTS[layout][2]
    within = {"rtol": 1e-10, "atol": 1e-10} if double else {"rtol": 1e-4, "atol": 1e-5}
    pairs = [(found[key], wanted[key]) for key in ("curve", "evaluations")]
    for one, other in (*pairs, (mixtures.losses_of(runs["folder"] / layout), wanted["losses"])):
        torch.testing.assert_close(*(torch.tensor(each, dtype=torch.float64) for each in (one, other)), **within)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        assert "lora" in name
        torch.testing.assert_close(found["weights"][name], weight, **within)
    load = "expert_load_by_layer"
    assert found["summary"]["receipts"][load] == wanted["summary"]["receipts"][load]


def test_references_learn(references: Any) -> None:
    for reference in references.values():
        assert len({loss for loss, _ in reference["curve"]}) == 5
        assert all(float(weight.abs().sum()) > 0 for weight in reference["weights"].values())
