"""Adapters in mixtures of experts, compared with one process under every engine, with whole or divided experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import mixtures, parity
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = (
    "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --optimizer adamw_torch --num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02 --lora-rank 3"
)
EVERYTHING, EXPERTS = "all-linear,experts,gate", "experts"
CONTEXT, PIPELINE, TENSOR, GROUPS = (
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2",
    "--expert-model-parallel-size 2",
)
LAYOUTS = {  # name: (kind, modules with adapters, fp64, flags)
    "ddp": ("mixtral", EVERYTHING, True, "--micro-batch-size 1"),
    "fsdp": ("mixtral", EVERYTHING, True, "--micro-batch-size 1 --fsdp-memory-optimization --checkpoint-activations"),
    "fsdp, int4": (
        "mixtral", EVERYTHING, True, "--micro-batch-size 1 --fsdp-memory-optimization --quantize-base int4",
    ),
    "copies of shards, int8": (
        "qwen3-moe", EXPERTS, True,
        "--micro-batch-size 2 --fsdp-memory-optimization --fsdp-shard-size 2 --quantize-base int8",
    ),
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
DEFAULT = ("stages, only experts", "groups, sharded")
"""The covering table has adapters in mixtures under ZeRO-3."""
PARAMETERS = by_default(DEFAULT, LAYOUTS)


def _flags(layout: str) -> tuple[str, bool, str]:
    kind, targets, double, flags = LAYOUTS[layout]
    return _job(kind, flags), double, f"{STEPS} --lora-target-modules {targets} {flags}"


def _job(kind: str, flags: str) -> str:
    """Return a model with four blocks for stages, otherwise one with two."""
    return f"{kind}-wide" if PIPELINE in flags else f"{kind}-shallow"


def _reference(layout: str) -> parity.Trained:
    """Train in one process, with one micro batch per step."""
    kind, targets, double, flags = LAYOUTS[layout]
    coding = flags.partition("--quantize-base ")[2]
    whole = f"{STEPS} --lora-target-modules {targets} --micro-batch-size 8"
    whole += f" --quantize-base {coding}" if coding else ""
    return parity.reference(_job(kind, flags), double, whole, lr="1e-2")


def _in_four_workers(workers: Any, layouts: list[str]) -> dict[str, parity.Trained]:
    return {layout: parity.train(*_flags(layout), lr="1e-2") for layout in layouts}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, parity.Trained]:
    return run_in_workers(4, _in_four_workers, selected(request, "layout"))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", PARAMETERS)
def test_layout_follows_one_process(layout: str, runs: Any) -> None:
    found, wanted, double = runs[layout], _reference(layout), LAYOUTS[layout][2]
    within = {"rtol": 1e-10, "atol": 1e-10} if double else {"rtol": 1e-4, "atol": 1e-5}
    values = [(run["curve"], run["evaluations"], mixtures.losses_of(run["lines"])) for run in (found, wanted)]
    for one, other in zip(*values, strict=True):
        assert len(one) > 0
        torch.testing.assert_close(*(torch.tensor(each, dtype=torch.float64) for each in (one, other)), **within)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        assert "lora" in name
        torch.testing.assert_close(found["weights"][name], weight, **within)
    load = "expert_load_by_layer"
    assert found["summary"]["receipts"][load] == wanted["summary"]["receipts"][load]


@pytest.mark.parametrize("layout", PARAMETERS)
def test_references_learn(layout: str) -> None:
    reference = _reference(layout)
    assert len({loss for loss, _ in reference["curve"]}) == 3
    assert len(reference["evaluations"]) == 2
    assert all(float(weight.abs().sum()) > 0 for weight in reference["weights"].values())
