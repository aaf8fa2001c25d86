"""Losses that take derivatives through the model: right where an engine can, refused before they do harm elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import parity
from tests.support.jobs import CausalJob
from tests.support.selection import by_default, selected
from tests.support.whole_batches import (
    FLAGS,
    WIDTH,
    WORDS,
    Batch,
    TransformerJob,
    assert_follows,
    in_plain_torch,
    under_engines,
)
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

TABLE = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class AdversarialJob(TransformerJob):
    """Also trains on the inputs that are moved a little in the direction of a higher loss (FreeLB, one step)."""

    order = 1

    def at(self, inputs: torch.Tensor, model: Any, batch: Batch) -> torch.Tensor:
        return self.loss_of(model(inputs_embeds=inputs, attention_mask=batch["attention_mask"]).logits, batch)

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        inputs = TABLE[batch["input_ids"]].to(torch.float64 if self.double else torch.float32).requires_grad_()
        loss = self.at(inputs, model, batch)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=self.order > 1, retain_graph=True)
        more = gradient.square().sum() if self.order > 1 else self.at(inputs.detach() + 0.1 * gradient, model, batch)
        return loss + more, self.count_targets(batch)


class PenalizedJob(AdversarialJob):
    """A penalty on the gradient of the inputs, whose gradient is a second derivative."""

    order = 2


class AddingJob(TransformerJob):
    """Leaves gradients, as ``loss.backward()`` does."""

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        loss, count = super().compute_loss(model, batch)
        loss.backward(retain_graph=True)
        return loss, count


class ProbedJob(TransformerJob):
    """Trains a probe on the hidden state. It is another model, with its own backward and optimizer."""

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        if not hasattr(self, "probe"):
            torch.manual_seed(7)
            self.probe = nn.Linear(WORDS, 2)
        logits = self.logits(model, batch)
        self.probe(logits.detach().float()).square().mean().backward()
        self.probe_gradients = [p.grad for p in self.probe.parameters()]
        return self.loss_of(logits, batch), self.count_targets(batch)


FIRST = ("ddp", "oss", "sdp", "fsdp", "distributed-optimizer", "tensor")
SECOND = ("ddp", "oss", "sdp", "distributed-optimizer")
FLAG = {
    **{f"zero-{stage}": f"ZeRO-{stage}" for stage in (1, 2, 3)},
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
    "fsdp": "--fsdp-memory-optimization",
    "tensor": "--tensor-model-parallel-size",
}
Case = tuple[type[TransformerJob], str]
WORKS: dict[str, Case] = {
    **{f"first-{engine}": (AdversarialJob, engine) for engine in FIRST},
    **{f"second-{engine}": (PenalizedJob, engine) for engine in SECOND},
    **{f"probe-{engine}": (ProbedJob, engine) for engine in ("fsdp", "zero-2", "zero-3", "pipeline")},
}
REFUSED: dict[str, Case] = {
    **{f"no-{engine}": (AdversarialJob, engine) for engine in FLAG if engine not in FIRST},
    **{f"once-{engine}": (PenalizedJob, engine) for engine in ("fsdp", "tensor")},
    **{f"adds-{engine}": (AddingJob, engine) for engine in ("ddp", "fsdp", "zero-2", "pipeline")},
}
MESSAGES = {
    "no": "the loss takes a derivative through the model, which is not possible with {flag}",
    "once": "a second derivative (create_graph=True) through the model, which is not possible with {flag}",
    "adds": "a backward in the loss adds to the gradients of the model",
}
SHORT = ("first-ddp", "first-fsdp", "first-tensor", "second-sdp", "second-distributed-optimizer", "probe-zero-3")
SHORT_REFUSED = ("no-zero-1", "no-zero-3", "no-pipeline", "no-context", "once-fsdp", "once-tensor", "adds-fsdp")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The outcomes by rank."""
    cases = selected(request, "case")
    return [
        dict(zip(cases, found, strict=True))
        for found in run_in_workers(2, under_engines, [(WORKS | REFUSED)[case] for case in cases])
    ]


@pytest.mark.parametrize("case", by_default(SHORT, WORKS))
def test_engine_follows_a_plain_loop(case: str, runs: Any) -> None:
    for run in runs:
        assert_follows(run[case], *WORKS[case])


@pytest.mark.parametrize("case", by_default(SHORT_REFUSED, REFUSED))
def test_what_would_be_wrong_is_refused(case: str, runs: Any) -> None:
    what, _, engine = case.partition("-")
    for run in runs:
        assert MESSAGES[what].format(flag=FLAG.get(engine)) in run[case]
        assert "where  compute_loss(model, batch)" in run[case]


def test_the_penalty_matters() -> None:
    """Otherwise it would be easy to follow."""
    first, plain = (in_plain_torch(kind)["curve"][0] for kind in (PenalizedJob, TransformerJob))
    assert abs(first[1] - plain[1]) > 0.1


@pytest.mark.parametrize("flags", ["--checkpoint-activations", "--checkpoint-activations --layerwise-lr-decay 0.9"])
def test_measurements_before_the_first_step_end_at_the_backward(flags: str) -> None:
    """They keep no values for it. The receipts of recomputation must not need more of the loss."""
    job = AdversarialJob([*FLAGS.split(), *flags.split()])
    job.fit()
    if "layerwise" not in flags:
        torch.testing.assert_close(job.curve, in_plain_torch(AdversarialJob)["curve"], rtol=1e-9, atol=1e-9)


class UnusedDerivativeJob(CausalJob):
    """Takes a derivative of its loss and does not use it."""

    takes = True

    def compute_loss(self, model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        if self.takes and torch.is_grad_enabled():
            torch.autograd.grad(loss, next(self.model.parameters()), retain_graph=True)
        return loss


class SameLossJob(UnusedDerivativeJob):
    takes = False


MIXTURE = "--num-experts 2 --moe-loss-coeff 0.1"


@pytest.mark.parametrize("flags", [MIXTURE, "--fused-linear-cross-entropy"])
def test_a_derivative_leaves_no_trace_in_losses_that_compute_their_gradient_themselves(flags: str) -> None:
    """A backward adds the balance loss of a mixture, and scales the gradients of the fused loss in place."""
    sizes = "--train-iters 2 --global-batch-size 4 --micro-batch-size 2 --lr 1e-3 --log-interval 1 --no-export-model"
    plain, found = (
        parity.trained(kind([*sizes.split(), *flags.split()])) for kind in (SameLossJob, UnusedDerivativeJob)
    )
    assert found["curve"] == plain["curve"]
    for line, wanted in zip(found["lines"], plain["lines"], strict=True):
        assert {key: line[key] for key in line if "loss" in key} == {
            key: wanted[key] for key in wanted if "loss" in key
        }


class InnerDerivativeJob(CausalJob):
    """Returns the norm of a gradient, which a mixture's balance loss must not change."""

    def compute_loss(self, model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        if torch.is_grad_enabled():
            parameters = [p for name, p in self.model.named_parameters() if "router" in name or "gate" in name]
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            self.norms = [float(g.norm()) for g in gradients if g is not None]
        return loss


def test_a_derivative_in_the_loss_has_no_balance_loss() -> None:
    sizes = "--train-iters 1 --global-batch-size 4 --micro-batch-size 2 --lr 1e-3 --no-export-model --num-experts 2"
    jobs = [InnerDerivativeJob([*sizes.split(), "--moe-loss-coeff", coeff]) for coeff in ("0", "10")]
    for job in jobs:
        job.fit()
    assert jobs[0].norms
    assert jobs[0].norms == jobs[1].norms
