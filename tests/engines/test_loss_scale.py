"""The dynamic loss scale, alone and in a run that overflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates.engines.step import DynamicLossScale
from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import CausalJob

FLAGS = "--lr 1e-3 --train-iters 6 --micro-batch-size 4 --log-interval 1 --mixed-precision fp16"


def test_scale_halves_on_overflow_and_grows_after_good_steps() -> None:
    scale = DynamicLossScale(1024.0, growth_interval=3)
    scale.update(overflow=True)
    assert scale.scale == 512
    for expected in (512, 512, 1024, 1024):
        scale.update(overflow=False)
        assert scale.scale == expected
    scale.update(overflow=True)
    restored = DynamicLossScale()
    restored.load_state(scale.state())
    assert restored.state() == scale.state() == {"scale": 512.0, "good_steps": 0}


class Overflowing(CausalJob):
    """Starts with a loss scale beyond the range of fp16, and records the weights before each step."""

    def on_train_start(self) -> None:
        self.weights: list[torch.Tensor] = [self.flat()]

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()

    def on_step_end(self, step: int, result: Any) -> None:
        self.weights.append(self.flat())


@pytest.mark.parametrize("start", [2.0**127, 65536.0])
def test_overflowed_steps_are_skipped_and_leave_the_weights(
    start: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rapidformer_templates.engines.local.DynamicLossScale", lambda: DynamicLossScale(start, growth_interval=2000)
    )
    job = Overflowing([*FLAGS.split(), "--save", str(tmp_path / "run")])
    job.fit()
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    skipped = [line["skipped"] for line in lines]
    assert [line["grad_norm"] is None for line in lines] == skipped
    moved = [not torch.equal(a, b) for a, b in zip(job.weights[:-1], job.weights[1:], strict=True)]
    assert moved == [not skip for skip in skipped]
    assert skipped[0] == (start > 65536)
    assert all(torch.isfinite(weights).all() for weights in job.weights)
