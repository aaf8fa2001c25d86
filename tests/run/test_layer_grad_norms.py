"""Layouts report the gradient norms of one process for each layer. Together they give ``grad_norm``.

``tests/engines/test_features_of_a_step.py`` has the other engines.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from rapidformer_templates.planning.environment import installed_packages
from tests.support import parallel_jobs
from tests.support.parity import Trained, reference, train
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLAGS = "--log-layer-grad-norms --train-iters 3 --global-batch-size 8 --clip-grad 0.5"
JOB = "llama-4-untied"
EXPERTS = "--num-experts 4 --moe-capacity-factor 4"
FP16 = "--mixed-precision fp16"
LAYERS = ["model.embed_tokens", *(f"model.layers.{number}" for number in range(4)), "model.norm", "lm_head"]
assert JOB in parallel_jobs.JOBS

ON_TWO = {
    "experts": f"{EXPERTS} --expert-parallel",
    "fp16": FP16,
    "fp16, fsdp": f"{FP16} --fsdp-memory-optimization",
}
ON_FOUR = {
    "tensor 2 × pipeline 2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "pipeline 2, fp16": f"--pipeline-model-parallel-size 2 --zero-2-memory-optimization {FP16}",
}
if "deepspeed" in installed_packages():
    ON_TWO |= {f"zero-{stage}, fp16": f"--zero-{stage}-memory-optimization {FP16}" for stage in (2, 3)}
LONGER = {"fp16", "fp16, fsdp", "pipeline 2, fp16"}
"""For ``make test-longer``. ZeRO-2 and ZeRO-3 in fp16 take the same way."""


def _norms(run: Trained) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name.startswith("grad_norm")}
            for line in run["lines"] if "loss" in line]  # fmt: skip


def _in_workers(workers: Any, layouts: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    micro = "--micro-batch-size 2"
    return {layout: _norms(train(JOB, False, f"{FLAGS} {micro} {flags}")) for layout, flags in layouts.items()}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[dict[str, float]]]:
    runs: dict[str, list[dict[str, float]]] = {}
    for count, layouts in ((2, ON_TWO), (4, ON_FOUR)):
        chosen = {layout: layouts[layout] for layout in selected(request, "layout") if layout in layouts}
        if chosen:
            runs |= run_in_workers(count, _in_workers, chosen)[0]
    return runs


def _alone(layout: str) -> list[dict[str, float]]:
    """Return the norms of one process that computes the same."""
    same = FP16 if "fp16" in layout else EXPERTS if layout == "experts" else ""
    return _norms(reference(JOB, False, f"{FLAGS} --micro-batch-size 2 {same}"))


@pytest.mark.parametrize("layout", by_default((ON_TWO | ON_FOUR).keys() - LONGER, ON_TWO | ON_FOUR))
def test_norms_of_layers_are_those_of_one_process(layout: str, found: Any) -> None:
    expected = _alone(layout)
    assert len(expected) == 3
    rel = 2e-2 if "fp16" in layout else 1e-4
    for line, wanted in zip(found[layout], expected, strict=True):
        assert sorted(line) == sorted(wanted)
        assert sorted(line) == sorted(["grad_norm", *(f"grad_norm/{layer}" for layer in LAYERS)])
        assert line == pytest.approx(wanted, rel=rel)
        together = math.hypot(*(value for name, value in line.items() if name != "grad_norm"))
        assert together == pytest.approx(line["grad_norm"], rel=1e-3 if "fp16" in layout else 1e-5)


def test_the_flag_changes_nothing_else() -> None:
    plain = FLAGS.replace("--log-layer-grad-norms ", "")
    assert (
        reference(JOB, False, f"{FLAGS} --micro-batch-size 2")["curve"]
        == reference(JOB, False, f"{plain} --micro-batch-size 2")["curve"]
    )
