"""A micro batch that does not count has no effect: its loss is exactly zero, and the model stays unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.backwards import reached_parameters
from rapidformer_templates.engines.forwards import preserve_state, restored_buffers
from rapidformer_templates.engines.loss import Recorder, weighted_loss
from tests.support.jobs import CausalJob

INPUT = torch.ones(4, 3)
IDLE, WITHOUT_TARGETS = MicroBatch(INPUT, [0], targets=4, idle=True), MicroBatch(INPUT, [0], targets=0)


class Model(nn.Module):
    """Returns ``function`` of a layer's output."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.function = function

    def forward(self, rows: torch.Tensor) -> Any:
        return self.function(self.layer(rows))


BROKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "infinite": lambda rows: rows.masked_fill(torch.eye(4, 3).bool(), -torch.inf),
    "not a number": lambda rows: rows * torch.nan,
    "0/0": lambda rows: (rows * 0).sum() / torch.zeros(()),  # a loss alone
    "a root of zero": lambda rows: (rows * 0).sqrt(),  # 0 times its derivative is not zero
}


@pytest.mark.parametrize("microbatch", [IDLE, WITHOUT_TARGETS], ids=["idle", "without targets"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_counts_for_nothing_is_an_exact_zero(name: str, microbatch: MicroBatch) -> None:
    model = Model(BROKEN[name])
    for parameter in model.layer.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    come: list[int] = []
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.layer.parameters()]  # type: ignore[union-attr]
    for node in nodes:
        node.register_hook(lambda *_: come.append(1))
    recorder = Recorder(model)
    loss = weighted_loss(recorder(INPUT).mean(), recorder, microbatch, weight=0.5)
    assert float(loss) == 0
    assert {id(p) for p in reached_parameters(loss)} == {id(p) for p in model.layer.parameters()}
    loss.backward()
    assert len(come) == 2  # others may wait for this worker there
    assert all(torch.equal(p.grad, torch.full_like(p, 0.25)) for p in model.layer.parameters() if p.grad is not None)
    assert all(p.grad is None for p in model.other.parameters())


def test_a_hook_that_sees_that_nothing_counts_still_comes_to_the_model() -> None:
    model = Model(BROKEN["infinite"])

    recorder = Recorder(model)
    recorder(INPUT)
    loss = weighted_loss(torch.zeros(()), recorder, WITHOUT_TARGETS, weight=0.5)
    assert {id(p) for p in reached_parameters(loss)} == {id(p) for p in model.layer.parameters()}


def test_buffers_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with restored_buffers(model):
        loss = model(INPUT + torch.randn(4, 3)).square().sum()
        model[1].running_mean = torch.ones(3)  # replaced by another tensor
    loss.backward()  # the tensors that it needs still exist
    assert model[0].weight.grad is not None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model[1].running_mean is model.get_buffer("1.running_mean")


def test_a_forward_without_trace_draws_no_random_number() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
    before, state = model[1].running_var.clone(), torch.get_rng_state()
    with preserve_state(model):
        model(torch.randn(4, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[1].running_var, before)


class NormedJob(CausalJob):
    """A batch norm sees the embeddings."""

    def make(self) -> nn.Module:
        model = super().make()
        model.norm = norm = nn.BatchNorm1d(16)
        model.transformer.drop.register_forward_hook(
            lambda module, inputs, output: (norm(output.detach().flatten(0, 1)), None)[1]
        )
        return model


def test_the_forwards_of_receipts_do_not_count_for_batch_norm() -> None:
    """With activation checkpointing, the receipts add two forwards to the first step."""
    flags = "--train-iters 3 --micro-batch-size 4 --lr 1e-3"
    job = NormedJob([*flags.split(), "--checkpoint-activations"])
    summary = job.fit()
    assert summary["receipts"]["saved_tensor_bytes"] < summary["receipts"]["saved_tensor_bytes_without"]
    assert int(job.model.norm.num_batches_tracked) == 3
