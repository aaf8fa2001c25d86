"""Adapters in mixtures of experts, compared with one process under every engine, with whole or divided experts."""

from __future__ import annotations

import pytest

from tests.support import mixtures
from tests.support.parity import assert_close, assert_follows, observed, reference
from tests.support.selection import by_default

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = (
    "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --optimizer adamw_torch --num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02 --lora-rank 3"
)
CONTEXT, PIPELINE = "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
TENSOR, GROUPS = "--tensor-model-parallel-size 2", "--expert-model-parallel-size 2"
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
LAYOUTS = [("mixtral", "all-linear,experts,gate", flags) for flags in ALL_OF_MIXTRAL]
LAYOUTS += [(kind, "experts", flags) for kind, several in EXPERTS_ALONE.items() for flags in several]
DEFAULT = [LAYOUTS[-1], ("mixtral", "all-linear,experts,gate", f"--micro-batch-size 1 {GROUPS} {FSDP}")]
"""The covering table has adapters in mixtures under ZeRO-3."""


@pytest.mark.parametrize(("kind", "targets", "flags"), by_default(DEFAULT, LAYOUTS))
def test_layout_follows_one_process(kind: str, targets: str, flags: str) -> None:
    job = f"{kind}-wide" if PIPELINE in flags else f"{kind}-shallow"  # four blocks for stages
    divided = any(size in flags for size in (TENSOR, CONTEXT, GROUPS))
    double = divided or "zero-" not in flags  # DeepSpeed's masters are in fp32
    steps, coding = f"{STEPS} --lora-target-modules {targets}", flags.partition("--quantize-base ")[1:]
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
