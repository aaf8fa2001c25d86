"""Label smoothing in one process equals torch's own argument. ``test_features_of_a_step.py`` has the engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.jobs import DeepJob
from tests.support.parity import Trained, assert_follows, trained
from tests.support.selection import by_default

SHARE = 0.2
STEPS = "--task causal_lm --train-iters 4 --global-batch-size 8 --clip-grad 0.5 --log-interval 1 --no-export-model"
ON = f"--label-smoothing {SHARE}"
ALONE = {
    "plain": "--micro-batch-size 8",
    "accumulated": "--micro-batch-size 2 --checkpoint-activations",
    "fused": "--micro-batch-size 8 --fused-linear-cross-entropy",
    "compiled": "--micro-batch-size 8 --torch-compile aot_eager",
}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(ALONE.keys() - {"compiled"}, ALONE))
def test_one_process_computes_torchs_smoothed_loss(name: str, wanted: Trained) -> None:
    assert_follows(run(f"{STEPS} {ON} {ALONE[name]}"), wanted, weights=(1e-4, 1e-5))


def test_without_the_flag_it_is_another_loss(wanted: Trained) -> None:
    plain = run(f"{STEPS} {ALONE['plain']} --train-iters 1")
    assert abs(plain["curve"][0][1] - wanted["curve"][0][1]) > 0.01  # the norm of the gradient
