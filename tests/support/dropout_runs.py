"""Runs of a classifier with dropout that can die after a step, and a comparison of two runs bit by bit."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import ClassJob, _bert
from tests.support.lines import Died

FLAGS = "--lr 1e-3 --train-iters 12 --micro-batch-size 2 --global-batch-size 4 --log-interval 1 --save-interval 3"

TIMES = {"samples_per_second", "tokens_per_second", "step_ms", "peak_memory_mb"}


class DropoutJob(ClassJob):
    """A classifier with dropout and evaluations that can die after a step."""

    layers = 2

    def build_data(self) -> Any:
        data = super().build_data()
        data.valid = data.train[:16]
        return data

    def make(self) -> torch.nn.Module:
        config = _bert()
        config.num_hidden_layers = self.layers
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.2
        return BertForSequenceClassification(config)


def run(folder: Path, *flags: str, dies_after: int | None = None) -> None:
    job = DropoutJob([*FLAGS.split(), "--eval-interval", "4", "--save", str(folder), *flags])
    job.dies_after = dies_after
    with pytest.raises(Died) if dies_after else nullcontext():
        job.fit()


def traces(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the metrics without times, and the final weights."""
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(folder / "metrics.jsonl")]
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "checkpoints" / "step-12").glob("weights-*.safetensors")):
        weights |= load_file(file)
    return lines, weights


def assert_same(one: Path, other: Path) -> None:
    (lines, weights), (other_lines, other_weights) = traces(one), traces(other)
    assert lines == other_lines
    assert len([line for line in lines if "loss" in line]) == 12
    assert weights.keys() == other_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]), name
