"""Parameters that share memory without being one parameter: each engine refuses them before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates.errors import ModelError
from rapidformer_templates.run.building import check_memory
from tests.support.jobs import DeepJob
from tests.support.parity import trained
from tests.support.selection import by_default
from tests.support.worker_pool import Failure, outcomes_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

ENGINES = {
    "one process": "",
    "ddp": "",
    "oss": "--oss-memory-optimization",
    "fsdp": "--fsdp-memory-optimization",
    "zero-1": "--zero-1-memory-optimization",
    "zero-3": "--zero-3-memory-optimization",
    "distributed-optimizer": "--use-distributed-optimizer",
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
}
SHORT = ("one process", "fsdp", "distributed-optimizer")


class Shared(DeepJob):
    """Two blocks with one memory for a weight of each."""

    def make(self) -> nn.Module:
        model: Any = super().make()
        first, second = (block.mlp.c_fc for block in model.transformer.h[:2])
        second.weight.data = first.weight.data
        return model


def _train(workers: Any, flags: str) -> None:
    trained(Shared(f"--train-iters 1 --lr 1e-2 --device cpu --no-export-model {flags}".split()))


@pytest.mark.parametrize("engine", by_default(SHORT, ENGINES))
def test_an_engine_does_not_separate_them_in_silence(engine: str) -> None:
    """Plain torch updates both on a CPU. FSDP, OSS, ZeRO and tensor parallelism would give each its own memory."""
    message = "transformer.h.0.mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight are two tensors on one memory"
    if engine == "one process":
        with pytest.raises(ModelError, match=message):
            _train(None, "")
        return
    for failure in outcomes_in_workers(2, _train, ENGINES[engine]):
        assert isinstance(failure, Failure)
        assert message in failure.text


class Pair(nn.Module):
    """Two linear layers of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def _transposed(pair: Pair) -> None:
    pair.b.weight.data = pair.a.weight.data.T


def _view(pair: Pair) -> None:
    pair.register_buffer("first_row", pair.a.weight.data[0])


def _overlapping_rows(pair: Pair) -> None:
    memory = torch.randn(6, 4)
    pair.a.weight.data, pair.b.weight.data = memory[:4], memory[2:]


def _one_parameter(pair: Pair) -> None:
    pair.b.weight = pair.a.weight


def _columns(pair: Pair) -> None:
    memory = torch.randn(4, 8)
    pair.a.weight.data, pair.b.weight.data = memory[:, :4], memory[:, 4:]


def _rows(pair: Pair) -> None:
    memory = torch.randn(8, 4)
    pair.a.weight.data, pair.b.weight.data = memory[:4], memory[4:]


def _frozen(pair: Pair) -> None:
    pair.b.weight.data = pair.a.weight.data
    pair.requires_grad_(False)


@pytest.mark.parametrize(
    ("share", "hint"),
    [(_transposed, "b.weight = a.weight"), (_overlapping_rows, "b.weight = a.weight"), (_view, "register a copy")],
)
def test_what_overlaps_is_refused(share: Callable[[Pair], None], hint: str) -> None:
    pair = Pair()
    share(pair)
    with pytest.raises(ModelError) as caught:
        check_memory(pair)
    assert hint in str(caught.value)


@pytest.mark.parametrize("share", [_one_parameter, _columns, _rows, _frozen])
def test_what_does_not_is_trained(share: Callable[[Pair], None]) -> None:
    pair = Pair()
    share(pair)
    check_memory(pair)


def test_moving_a_model_separates_them() -> None:
    """The reason to refuse them in one process as well."""
    pair = Pair()
    pair.b.weight.data = pair.a.weight.data
    pair.to(torch.float64)
    assert pair.a.weight.data_ptr() != pair.b.weight.data_ptr()
