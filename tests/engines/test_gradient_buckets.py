"""DDP stores gradients once, in its buckets, for any number of micro batches per step."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from rapidformer_templates import Data
from rapidformer_templates.engines import local
from rapidformer_templates.engines.local import DDPEngine
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from tests.support.jobs import OTHERS
from tests.support.parity import train
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed
STEPS = 4


def _storages(tensors: Any) -> dict[int, int]:
    """Return bytes by address."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _watch(workers: Any, micro_batches: int) -> dict[str, Any]:
    """Record the storages of gradients after each micro batch, the buckets that DDP sends, and peak memory of steps."""
    held: list[dict[int, int]] = []
    sent: list[int] = []
    peaks: list[int] = []
    live = LiveStorages()
    average, backward = DDPEngine._average_if_last, DDPEngine._backward

    def see_bucket(self: DDPEngine, bucket: Any) -> Any:
        if self._exchanges:
            sent.append(bucket.buffer().untyped_storage().data_ptr())
        return average(self, bucket)

    def see_gradients(self: DDPEngine, loss: Any) -> None:
        backward(self, loss)
        held.append(_storages(parameter.grad for parameter in self._parameters))

    class Job(OTHERS["wide"]):  # type: ignore[misc]
        def build_data(self) -> Data:
            data = super().build_data()
            return replace(data, train=[data.train[1]] * 64)  # all batches need the same memory

        def on_train_start(self) -> None:
            live.__enter__()

        def on_step_end(self, step: int, result: Any) -> None:
            peaks.append(live.peak)
            live.reset_peak()
            if step == STEPS:
                live.__exit__(None, None, None)

    flags = f"--train-iters {STEPS} --micro-batch-size 2 --global-batch-size {4 * micro_batches} --lr 1e-3"
    job = Job(flags.split())
    with (
        mock.patch.object(DDPEngine, "_average_if_last", see_bucket),
        mock.patch.object(DDPEngine, "_backward", see_gradients),
    ):
        receipts = job.fit()["receipts"]
    assert receipts["freed_memory"] == ("kept" if sys.platform == "linux" else "as usual")
    return {"held": held, "sent": sent, "peaks": peaks, "receipt": receipts["gradient_bytes"]}


def test_accumulated_gradients_lie_in_the_buckets_alone() -> None:
    for once, thrice in zip(run_in_workers(2, _watch, 1), run_in_workers(2, _watch, 3), strict=True):
        whole = once["receipt"]
        assert thrice["receipt"] == whole
        assert [sum(storages.values()) for storages in thrice["held"]] == [whole] * 3 * STEPS
        places = [set(storages) for storages in thrice["held"]]
        assert places[1:] == [places[1]] * (3 * STEPS - 1)  # DDP rebuilds its buckets before the second
        assert len(places[1]) > 1
        assert set(thrice["sent"]) == places[1]
        assert max(thrice["peaks"][2:]) < max(once["peaks"][2:]) + whole / 10


def _exchanges(workers: Any) -> int:
    calls: list[Any] = []

    def counted(group: Any, bucket: Any) -> Any:
        calls.append(bucket)
        return allreduce_hook(group, bucket)

    with mock.patch.object(local, "allreduce_hook", counted):
        train("causal", False, "--train-iters 4 --global-batch-size 16 --micro-batch-size 2")
    return len(calls)


def test_gradients_are_exchanged_once_per_step() -> None:
    """Averaging them in each of the four micro batches would give the same numbers and cost four times as much."""
    assert run_in_workers(2, _exchanges) == [4, 4]
