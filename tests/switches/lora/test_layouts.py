"""Adapters follow one process under every engine that divides a model, and move between all engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import mixtures
from tests.support.jobs import OTHERS
from tests.support.parallel_jobs import begin
from tests.support.parity import assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LORA = "--lora-rank 3 --lora-alpha 24"
STEPS = f"--train-iters 4 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --no-export-model {LORA}"
DORA = "--lora-variant dora"
LAYOUTS = {  # name: (job, flags of the layout, flags that one process needs, too)
    "tp2-pp2": ("gpt2-4-tied", f"--micro-batch-size 4 {TENSOR} {PIPELINE}", ""),
    "tp2-dp2-zero-2": ("bert-4-untied", f"--micro-batch-size 2 {TENSOR} --zero-2-memory-optimization", ""),
    "pp2-dp2": ("neox-4-untied", f"--micro-batch-size 2 {PIPELINE} --use-distributed-optimizer", ""),
    "dp4-dora": ("gpt2-4-tied", "--micro-batch-size 2 --fsdp-memory-optimization", DORA),
}


@pytest.mark.parametrize("layout", by_default(["tp2-pp2"], LAYOUTS))
def test_layout_follows_one_process(layout: str) -> None:
    job, flags, more = LAYOUTS[layout]
    found = observed(4, job, True, f"{STEPS} {flags} {more}")[0]
    wanted = reference(job, True, f"{STEPS} --micro-batch-size 4 {more}")
    assert_follows(found, wanted, 1e-9, 1e-11)
    counts = [run["summary"]["receipts"]["trained_parameters"] for run in (found, wanted)]
    assert 0 < counts[0] == counts[1]  # from all pipeline stages
    assert len({loss for loss, _ in wanted["curve"]}) == 4
    assert len(wanted["evaluations"]) == 2
    assert all("lora" in name and float(weight.abs().sum()) > 0 for name, weight in wanted["weights"].items())


RESUMED = f"--train-iters 10 --save-interval 2 --global-batch-size 8 --lr 1e-2 --no-export-model {LORA}"
CHAINS = {
    "gpt2-8-double": (
        f"--micro-batch-size 4 {TENSOR} {PIPELINE}",
        "--micro-batch-size 2 --fsdp-memory-optimization --resume",
        "--micro-batch-size 2 --use-distributed-optimizer --resume",
        f"--micro-batch-size 4 {PIPELINE} --resume",
    ),
    "gpt2-8-tied": (
        "--micro-batch-size 2 --fsdp-memory-optimization",
        "--micro-batch-size 2 --zero-3-memory-optimization --resume",
        "--micro-batch-size 1 --zero-1-memory-optimization --resume",
        "--micro-batch-size 2 --oss-memory-optimization --resume",
    ),
}
OTHERS["gpt2-8-double"] = type("Double", (OTHERS["gpt2-8-tied"],), {"double": True})


def _chain(workers: Any, folder: str, job: str) -> list[tuple[float, float]]:
    """Return the curve of a run whose parts die after steps 3, 5, 7 and 9, one step after the last checkpoint."""
    curve: list[tuple[float, float]] = []
    for number, flags in enumerate(CHAINS[job]):
        curve = [*curve[:-1], *begin(job, folder, f"{RESUMED} {flags}", 2 * number + 3)]
    return curve


@pytest.mark.longer
@pytest.mark.parametrize("job", CHAINS)
def test_adapters_go_from_any_engine_to_any_other(job: str, tmp_path: Path) -> None:
    first = run_in_workers(4, _chain, str(tmp_path / "chain"), job)[0]
    last = begin(job, str(tmp_path / "chain"), f"{RESUMED} --micro-batch-size 2 --resume")
    whole = begin(job, str(tmp_path / "whole"), f"{RESUMED} --micro-batch-size 8")
    # Gradients of the first matrices start at zero, and Adam's first steps divide rounding by its own magnitude.
    limits = {"rtol": 1e-9, "atol": 1e-11} if job.endswith("double") else {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(torch.tensor([*first[:-1], *last]), torch.tensor(whole), **limits)


# Mixtures of experts, under every engine, with whole or divided experts.

MIXTURE = (
    "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --optimizer adamw_torch --num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02 --lora-rank 3"
)
CONTEXT, GROUPS = "--context-parallel-size 2", "--expert-model-parallel-size 2"
FSDP, DIVIDED = "--fsdp-memory-optimization", "--expert-parallel"
ALL_OF_MIXTRAL = (  # adapters on all linear layers, experts and gates
    "--micro-batch-size 1",
    f"--micro-batch-size 1 {FSDP} --checkpoint-activations",
    f"--micro-batch-size 1 {FSDP} --quantize-base int4",
    "--micro-batch-size 2 --oss-sdp-memory-optimization",
    "--micro-batch-size 2 --zero-1-memory-optimization",
    "--micro-batch-size 1 --zero-2-memory-optimization",
    "--micro-batch-size 1 --zero-3-memory-optimization",
    f"--micro-batch-size 2 {TENSOR} --zero-2-memory-optimization",
    f"--micro-batch-size 2 {TENSOR} --sequence-parallel",
    f"--micro-batch-size 1 {PIPELINE} --checkpoint-activations",
    f"--micro-batch-size 2 {CONTEXT} --zero-1-memory-optimization",
    f"--micro-batch-size 1 {DIVIDED}",
    f"--micro-batch-size 2 {TENSOR} {DIVIDED}",
    f"--micro-batch-size 2 {GROUPS} --zero-2-memory-optimization",
    f"--micro-batch-size 1 {GROUPS} {FSDP}",
    f"--micro-batch-size 2 {CONTEXT} {GROUPS}",
    f"--micro-batch-size 2 {PIPELINE} {GROUPS}",
)
EXPERTS_ALONE = {
    "qwen3-moe": (
        f"--micro-batch-size 2 {FSDP} --fsdp-shard-size 2 --quantize-base int8",
        f"--micro-batch-size 2 {PIPELINE} {TENSOR}",
        f"--micro-batch-size 1 {GROUPS} --checkpoint-activations",
        f"--micro-batch-size 2 {DIVIDED} {FSDP}",
    ),
    "mixtral": (f"--micro-batch-size 1 {PIPELINE} --use-distributed-optimizer",),
}
IN_MIXTURES = [("mixtral", "all-linear,experts,gate", flags) for flags in ALL_OF_MIXTRAL]
IN_MIXTURES += [(kind, "experts", flags) for kind, several in EXPERTS_ALONE.items() for flags in several]
DEFAULT = [IN_MIXTURES[-1], ("mixtral", "all-linear,experts,gate", f"--micro-batch-size 1 {GROUPS} {FSDP}")]
"""The covering table has adapters in mixtures under ZeRO-3."""


@pytest.mark.parametrize(("kind", "targets", "flags"), by_default(DEFAULT, IN_MIXTURES))
def test_adapters_in_mixtures_follow_one_process(kind: str, targets: str, flags: str) -> None:
    job = f"{kind}-wide" if PIPELINE in flags else f"{kind}-shallow"  # four blocks for stages
    divided = any(size in flags for size in (TENSOR, CONTEXT, GROUPS))
    double = divided or "zero-" not in flags  # DeepSpeed's masters are in fp32
    steps, coding = f"{MIXTURE} --lora-target-modules {targets}", flags.partition("--quantize-base ")[1:]
    found = observed(4, job, double, f"{steps} {flags}", lr="1e-2")[0]
    wanted = reference(job, double, f"{steps} --micro-batch-size 8 {''.join(coding)}", lr="1e-2")
    within = (1e-10, 1e-10) if double else (1e-4, 1e-5)
    assert_follows(found, wanted, *within)
    assert_close(*(mixtures.losses_of(run["lines"]) for run in (found, wanted)), *within)
    load = "expert_load_by_layer"
    assert found["summary"]["receipts"][load] == wanted["summary"]["receipts"][load]
    assert len({loss for loss, _ in wanted["curve"]}) == 3
    assert len(wanted["evaluations"]) == 2
    assert all("lora" in name and float(weight.abs().sum()) > 0 for name, weight in wanted["weights"].items())
