"""Models with transposed weights and expanded buffers: NCCL refuses to exchange such tensors, gloo does not."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.system.workers import broadcast
from tests.support.jobs import DeepJob
from tests.support.parity import ENGINES, Trained, assert_follows, trained
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

FLAGS = "--train-iters 3 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --device cpu"


DDP = ("ddp", "oss", "sdp")
"""Torch's DDP and fairscale's SDP send buffers, and cannot send an expanded one at all."""


class Strided(DeepJob):
    """Its first block has a transposed weight, and a buffer of one value that is expanded to a row."""

    is_expanded = True

    def make(self) -> nn.Module:
        model: Any = super().make()
        weight = model.transformer.h[0].mlp.c_fc.weight
        weight.data = weight.data.t().contiguous().t()
        if self.is_expanded:
            model.transformer.h[0].register_buffer("scale", torch.ones(1).expand(8), persistent=False)
        return model


class AsNccl:
    """Wraps a collective of one tensor. It raises an error for a tensor that NCCL refuses."""

    def __init__(self, name: str) -> None:
        self.name, self.original = name, getattr(dist, name)

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert tensor.is_contiguous(), f"{self.name} of a tensor that is not contiguous"
        return self.original(tensor, *args, **kwargs)


def _train(workers: Any, engine: str) -> Trained:
    with (
        mock.patch.multiple(dist, **{name: AsNccl(name) for name in ("broadcast", "all_reduce")}),
        mock.patch.object(Strided, "is_expanded", engine not in DDP),
    ):
        return trained(Strided(f"{FLAGS} {ENGINES[engine]}".split()))


@pytest.mark.parametrize("engine", by_default(["distributed-optimizer"], ENGINES))
def test_engines_exchange_only_contiguous_tensors(engine: str) -> None:
    alone = trained(Strided(FLAGS.replace("--micro-batch-size 4", "--micro-batch-size 8").split()))
    assert_follows(run_in_workers(2, _train, engine)[0], alone, rtol=1e-4, atol=1e-5)


def _broadcast(workers: Any) -> list[list[float]]:
    torch.manual_seed(workers.rank)
    tensors = [torch.rand(3, 2).t(), torch.rand(2, 1).expand(2, 3), torch.rand(()).expand(2), torch.rand(2)]
    for tensor in tensors:
        broadcast(tensor, source=1)
    return [tensor.flatten().tolist() for tensor in tensors]


def test_any_tensor_gets_the_values_of_the_source() -> None:
    torch.manual_seed(1)
    wanted = [torch.rand(3, 2).t(), torch.rand(2, 1).expand(2, 3), torch.rand(()).expand(2), torch.rand(2)]
    assert run_in_workers(2, _broadcast) == [[tensor.flatten().tolist() for tensor in wanted]] * 2
