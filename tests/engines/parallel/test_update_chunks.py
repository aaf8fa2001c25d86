"""16-bit sums of gradients: an update bucket by bucket equals one with all gradients at once, bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.parallel import engine
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.switches.auto_strategy import model_shapes
from rapidformer_templates.switches.auto_strategy.layouts import Layout, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import predict
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from tests.support.jobs import VOCABULARY, CausalJob
from tests.support.parallel_jobs import JOBS
from tests.support.parity import Trained, trained
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

Job: Any = JOBS["gpt2-4-tied"]
LIMIT, LARGEST, CLIP = 700, VOCABULARY * 16, 0.01
"""Elements of a bucket and of the largest parameter, and a norm that every gradient here exceeds."""
STEPS = (
    f"--train-iters 3 --global-batch-size 8 --micro-batch-size 2 --lr 1e-3 --clip-grad {CLIP} --weight-decay 0.1 "
    "--grad-accum-dtype bf16 --no-export-model"
)
BF16, DISTRIBUTED = "--mixed-precision bf16", "--use-distributed-optimizer"
ALONE = {
    "default": BF16,
    "loss scale": "--mixed-precision fp16",
    "average": f"{BF16} --ema-decay 0.9",
    **{name: f"{BF16} --optimizer {name}" for name in ("adamw_torch", "adafactor", "lamb", "muon")},
}
TOGETHER = {
    "ddp": BF16,
    "distributed optimizer": f"{BF16} {DISTRIBUTED} --grad-reduce-dtype bf16",
    "distributed optimizer, loss scale": f"--mixed-precision fp16 {DISTRIBUTED} --optimizer adamw_anyprecision",
    "pipeline": f"{BF16} --pipeline-model-parallel-size 2",
}
SHORT = ("loss scale", "distributed optimizer")


class EstimatesForAll(torch.optim.AdamW):
    """A third-party optimizer: nobody knows how it treats gradients that arrive one after another."""


class WithEstimate(Job):
    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(EstimatesForAll, {"lr": 1e-3})


class Gradients:
    """The gradients that optimizers receive when they are called: number of elements, and norm."""

    def __init__(self) -> None:
        self.elements: list[int] = []
        self.norms: list[float] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        there = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        assert {gradient.dtype for gradient in there} <= {torch.float32}
        self.elements.append(sum(gradient.numel() for gradient in there))
        self.norms.append(float(torch.nn.utils.get_total_norm(there)))


@contextmanager
def _watched() -> Iterator[Gradients]:
    found = Gradients()
    hook = register_optimizer_step_pre_hook(found)
    try:
        yield found
    finally:
        hook.remove()


def _train(kind: type[Trainer], flags: str) -> tuple[Trained, Gradients]:
    with _watched() as found:
        return trained(kind([*STEPS.split(), *flags.split()])), found


def _both(workers: Any, cases: dict[str, str]) -> dict[str, Any]:
    """Train each case bucket by bucket and with all gradients at once."""
    found = {}
    with mock.patch.object(engine, "bucket_size_for", return_value=LIMIT):
        for name, flags in cases.items():
            apart = _train(Job, flags)
            with mock.patch.object(engine, "updates_in_chunks", return_value=False):
                found[name] = apart, _train(Job, flags)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Any]:
    cases = selected(request, "case")
    alone, together = ({case: flags for case, flags in some.items() if case in cases} for some in (ALONE, TOGETHER))
    return _both(None, alone) | (run_in_workers(2, _both, together)[0] if together else {})


@pytest.mark.distributed
@pytest.mark.parametrize("case", by_default(SHORT, [*ALONE, *TOGETHER]))
def test_the_update_is_that_of_all_gradients_at_once(case: str, runs: Any) -> None:
    (apart, by_bucket), (at_once, whole) = runs[case]
    assert apart["curve"] == at_once["curve"]
    assert all(torch.equal(apart["weights"][name], weight) for name, weight in at_once["weights"].items())
    assert max(by_bucket.elements) <= LARGEST
    assert max(whole.elements) > LARGEST
    assert len(by_bucket.elements) > 2 * len(whole.elements)


@pytest.mark.parametrize("case", by_default(["loss scale"], ["default", "loss scale", "adamw_torch"]))
def test_gradients_are_clipped_by_the_norm_of_all(case: str, runs: Any) -> None:
    (_, by_bucket), (at_once, whole) = runs[case]
    assert all(norm > CLIP for _, norm in at_once["curve"])
    updates = [norm for norm in whole.norms if norm]
    assert updates == pytest.approx([CLIP] * len(updates), rel=2e-5)
    together = sum(norm**2 for norm in by_bucket.norms) ** 0.5
    assert together == pytest.approx(CLIP * len(updates) ** 0.5, rel=2e-5)


def test_an_optimizer_of_somebody_else_has_all_gradients_at_once() -> None:
    with mock.patch.object(engine, "bucket_size_for", return_value=LIMIT):
        _, found = _train(WithEstimate, BF16)
    assert len(found.elements) == 3
    assert min(found.elements) > LARGEST


class Large(CausalJob):
    """The weights are large compared with a micro batch."""

    def build_data(self) -> Data:
        self.peaks: list[int] = []
        self.live = LiveStorages()
        self.live.__enter__()  # records the memory of the run from before the model exists
        return replace(super().build_data(), train=[dict.fromkeys(("input_ids", "labels"), np.full(8, 5))] * 32)

    def make(self) -> torch.nn.Module:
        sizes: dict[str, Any] = {"vocab_size": 512, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 2}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, use_cache=False))

    def on_step_end(self, step: int, result: Any) -> None:
        self.peaks.append(self.live.peak)
        self.live.reset_peak()
        if step == 3:
            self.live.__exit__(None, None, None)


@pytest.mark.longer
@pytest.mark.parametrize("apart", [True, False])
def test_the_planner_predicts_the_peak(apart: bool) -> None:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        rows = torch.zeros((samples, 8), dtype=torch.long)
        return {"input_ids": rows, "labels": rows, "attention_mask": rows}

    with (
        mock.patch.object(engine, "bucket_size_for", return_value=20_000),
        mock.patch.object(model_shapes, "bucket_size_for", return_value=20_000),
        mock.patch.object(engine, "updates_in_chunks", return_value=apart),
    ):
        job = Large([*STEPS.split(), *BF16.split()])
        job.fit()
        shapes = ModelShapes(lambda blocks: Assembly(job.make().train()), batch)
        setting = replace(memory_options_of(job.plan, shapes.width), updates_in_chunks=apart)
        predicted = predict(shapes, Layout(micro_batch=2, accumulation=4), setting)
    assert predicted.total == pytest.approx(max(job.peaks[1:]), rel=0.03)
    parameters = sum(p.numel() for p in job.make().parameters())
    assert (max(job.peaks[1:]) < 18 * parameters) == apart
