"""Layouts report the gradient norms of one process for each layer. Together they give ``grad_norm``.

``tests/engines/test_features_of_a_step.py`` has the other engines.
"""

from __future__ import annotations

import math

import pytest

from rapidformer_templates.planning.environment import installed_packages
from tests.support import parallel_jobs
from tests.support.parity import Trained, observed, reference
from tests.support.selection import by_default

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLAGS = "--log-layer-grad-norms --train-iters 3 --global-batch-size 8 --clip-grad 0.5 --micro-batch-size 2"
JOB = "llama-4-untied"
EXPERTS = "--num-experts 4 --moe-capacity-factor 4"
FP16 = "--mixed-precision fp16"
LAYERS = ["model.embed_tokens", *(f"model.layers.{number}" for number in range(4)), "model.norm", "lm_head"]
assert JOB in parallel_jobs.JOBS

LAYOUTS: dict[str, tuple[int, str]] = {
    "experts": (2, f"{EXPERTS} --expert-parallel"),
    "fp16": (2, FP16),
    "fp16, fsdp": (2, f"{FP16} --fsdp-memory-optimization"),
    "tensor 2 × pipeline 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pipeline 2, fp16": (4, f"--pipeline-model-parallel-size 2 --zero-2-memory-optimization {FP16}"),
}
"""Number of workers and flags."""
if "deepspeed" in installed_packages():
    LAYOUTS |= {f"zero-{stage}, fp16": (2, f"--zero-{stage}-memory-optimization {FP16}") for stage in (2, 3)}
SHORT = ("experts", "tensor 2 × pipeline 2", "zero-3, fp16")
"""By default. The others take the same way as one of these."""


def _norms(run: Trained) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name.startswith("grad_norm")}
            for line in run["lines"] if "loss" in line]  # fmt: skip


@pytest.mark.parametrize("layout", by_default(SHORT, LAYOUTS))
def test_norms_of_layers_are_those_of_one_process(layout: str) -> None:
    count, flags = LAYOUTS[layout]
    same = FP16 if "fp16" in layout else EXPERTS if layout == "experts" else ""
    found = _norms(observed(count, JOB, False, f"{FLAGS} {flags}")[0])
    expected = _norms(reference(JOB, False, f"{FLAGS} {same}"))
    assert len(expected) == 3
    rel = 2e-2 if "fp16" in layout else 1e-4
    for line, wanted in zip(found, expected, strict=True):
        assert sorted(line) == sorted(wanted) == sorted(["grad_norm", *(f"grad_norm/{layer}" for layer in LAYERS)])
        assert line == pytest.approx(wanted, rel=rel)
        together = math.hypot(*(value for name, value in line.items() if name != "grad_norm"))
        assert together == pytest.approx(line["grad_norm"], rel=1e-3 if "fp16" in layout else 1e-5)


def test_the_flag_changes_nothing_else() -> None:
    plain = FLAGS.replace("--log-layer-grad-norms ", "")
    assert reference(JOB, False, FLAGS)["curve"] == reference(JOB, False, plain)["curve"]
