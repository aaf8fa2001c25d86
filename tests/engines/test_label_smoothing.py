"""Label smoothing under engines and switches equals one process with torch's own argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from rapidformer_templates.planning.environment import installed_packages
from tests.support.jobs import DeepJob
from tests.support.parity import Trained, trained
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

SHARE = 0.2
STEPS = "--task causal_lm --train-iters 4 --global-batch-size 8 --clip-grad 0.5 --log-interval 1 --no-export-model"
ON = f"--label-smoothing {SHARE}"
ALONE = {
    "plain": "--micro-batch-size 8",
    "accumulated": "--micro-batch-size 2 --checkpoint-activations",
    "fused": "--micro-batch-size 8 --fused-linear-cross-entropy",
    "compiled": "--micro-batch-size 8 --torch-compile aot_eager",
}
TWO = {
    "ddp": "--micro-batch-size 4",
    "fsdp": "--micro-batch-size 2 --fsdp-memory-optimization --fused-linear-cross-entropy",
    "tensor": "--micro-batch-size 4 --tensor-model-parallel-size 2",
    "pipeline": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
}
if "deepspeed" in installed_packages():
    TWO["zero-3"] = "--micro-batch-size 4 --zero-3-memory-optimization"
SHORT = ("fsdp", "tensor", "pipeline")
"""Layouts that run by default: with the fused loss, with a divided vocabulary, and with a loss on the last stage."""


def run(flags: str) -> Trained:
    return trained(DeepJob([*flags.split(), "--lr", "1e-3"]))


class ByHand(DeepJob):
    """Uses the smoothed loss of the logits, without smoothing in evaluations."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        share = SHARE if torch.is_grad_enabled() else 0.0
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=share)


@pytest.fixture(scope="module")
def wanted() -> Trained:
    return trained(ByHand(f"{STEPS} --micro-batch-size 8 --lr 1e-3".split()))


def assert_follows(found: Trained, wanted: Trained) -> None:
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=1e-5, atol=1e-6)
    assert found["evaluations"] == pytest.approx(wanted["evaluations"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(ALONE.keys() - {"compiled"}, ALONE))
def test_one_process_computes_torchs_smoothed_loss(name: str, wanted: Trained) -> None:
    assert_follows(run(f"{STEPS} {ON} {ALONE[name]}"), wanted)


def test_without_the_flag_it_is_another_loss(wanted: Trained) -> None:
    plain = run(f"{STEPS} {ALONE['plain']} --train-iters 1")
    assert abs(plain["curve"][0][1] - wanted["curve"][0][1]) > 0.01  # the norm of the gradient


def _all(workers: Any, layouts: list[str]) -> dict[str, Trained]:
    return {layout: run(f"{STEPS} {ON} {TWO[layout]}") for layout in layouts}


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> list[dict[str, Trained]]:
    """The runs of two workers by rank."""
    return run_in_workers(2, _all, selected(request, "layout"))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(SHORT, TWO))
def test_two_workers_compute_torchs_smoothed_loss(
    layout: str, together: list[dict[str, Trained]], wanted: Trained
) -> None:
    for runs in together:
        assert_follows(runs[layout], wanted)
