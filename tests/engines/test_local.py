"""Every layout of the local engines follows the one-process run, and DDP stores gradients once, in its buckets."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from rapidformer_templates import Data
from rapidformer_templates.engines import local
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.local import DDPEngine
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from tests.support.combinations import place
from tests.support.jobs import JOBS, OTHERS
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, observed, reference, train
from tests.support.requests import config_of
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

CLIP = 0.1
ITERATIONS = 4
STEPS = f"--train-iters {ITERATIONS} --eval-interval 2 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1"
ALONE = {"accumulated": f"{STEPS} --micro-batch-size 2"}
PAIRS = {
    "ddp": f"{STEPS} --micro-batch-size 4",
    "ddp-accumulated": f"{STEPS} --micro-batch-size 2",
    "fsdp": f"{STEPS} --micro-batch-size 4 --fsdp-memory-optimization",
    "fsdp-accumulated-checkpointed": (
        f"{STEPS} --micro-batch-size 1 --fsdp-memory-optimization --checkpoint-activations"
    ),
    "ddp-checkpointed": f"{STEPS} --micro-batch-size 2 --checkpoint-activations",
}
PRECISIONS = {
    f"{kind}-{precision}": f"{STEPS} --mixed-precision {precision} {flags}"
    for precision in ("bf16", "fp16")
    for kind, flags in {
        "ddp": "--micro-batch-size 2",
        "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization",
        "fsdp-checkpointed": "--micro-batch-size 2 --fsdp-memory-optimization --checkpoint-activations",
    }.items()
}
CASES = [(job, double, layout) for job in JOBS for double in (False, True) for layout in (*ALONE, *PAIRS)]
READ = "fsdp-accumulated-checkpointed"
"""The layout whose receipts the tests read."""
SHORT = [("causal", True, layout) for layout in (READ, "accumulated", "ddp-accumulated")]
"""In fp64, a small mistake is larger than the rounding."""
PRECISE = ("ddp-fp16",)


def _reference(job: str, double: bool) -> Trained:
    return reference(job, double, f"{STEPS} --micro-batch-size 8")


def _values_after_setup(workers: Any, sizes: Sequence[int]) -> tuple[list[torch.Tensor], str]:
    """Return the tensors of a model of which each worker has built another one, and the error if that is refused."""
    plan = resolve(config_of(""), place(workers.world, "Trainer"))
    torch.manual_seed(workers.rank)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, sizes[workers.rank]))
    model[1].register_buffer("mask", torch.rand(6) < 0.5)
    model[0].weight.data = torch.randn(4, 6).t()  # not contiguous
    engine = load_object(plan.engine)(plan, workers, clip_grad=0.0)
    try:
        engine.setup(Assembly(model), OptimizerSpec(torch.optim.SGD, {"lr": 0.1}), lambda model, batch: model(batch))
    except RapidformerError as error:
        return [], str(error)
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())], ""


@pytest.mark.distributed
def test_ddp_begins_with_the_values_of_the_first_worker() -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    mask, weight = torch.rand(6) < 0.5, torch.randn(4, 6).t()
    expected = [weight, first[0].bias, *first[1].parameters(), *first[2].parameters(), *first[1].buffers(), mask]
    for values, error in run_in_workers(2, _values_after_setup, (3, 3)):
        assert not error
        assert len(values) == len(expected)
        for value, wanted in zip(values, expected, strict=True):
            assert torch.equal(value, wanted)


@pytest.mark.distributed
def test_ddp_refuses_different_models() -> None:
    for rank, (_, error) in enumerate(run_in_workers(2, _values_after_setup, (3, 5))):
        assert f"workers {rank} and {1 - rank} have built different models: 2.bias" in error


@pytest.mark.distributed
@pytest.mark.parametrize(("job", "double", "layout"), by_default(SHORT, CASES))
def test_layout_follows_one_process(job: str, double: bool, layout: str) -> None:
    expected = _reference(job, double)
    is_alone = layout in ALONE
    actual = reference(job, double, ALONE[layout]) if is_alone else observed(2, job, double, PAIRS[layout])[0]
    assert_follows(actual, expected, *(EXACT if double else ()))
    assert len(expected["evaluations"]) == 2
    # A constant curve would agree with anything.
    assert len({loss for loss, _ in expected["curve"]}) == ITERATIONS
    assert max(norm for _, norm in expected["curve"]) > 2 * CLIP  # so that clipping has an effect


@pytest.mark.slow
def test_reference_equals_a_loop_by_hand() -> None:
    """Compare the one-process run itself with plain torch: token losses, summed and divided by hand."""
    from rapidformer_templates.data.order import SampleOrder
    from tests.support.jobs import CausalJob, _pad, _sequences

    torch.manual_seed(1234)
    job = CausalJob(["--lr", "1e-3", "--train-iters", "1"])
    model = job.make().double()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )
    samples = _sequences()
    order = SampleOrder(len(samples), 8, 1234, by_epochs=False)
    curve = []
    for step in range(ITERATIONS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in order.step(step)[0]:
            batch = _pad([samples[index]], classes=False)
            logits = model(input_ids=batch["input_ids"]).logits[0, :-1]
            labels = batch["labels"][0, 1:]
            kept = labels != -100
            total = total - torch.log_softmax(logits, -1)[kept, labels[kept]].sum()
            count += int(kept.sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, CLIP / float(norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / ITERATIONS)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    assert_close(_reference("causal", True)["curve"], curve, *EXACT)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(PRECISE, PRECISIONS))
def test_half_precision_follows_one_process_of_that_precision(layout: str) -> None:
    """The tolerance is the rounding of the format: 8 bits of mantissa in bf16, 11 in fp16."""
    precision = layout.rpartition("-")[2]
    flags = f"{STEPS} --micro-batch-size 8 --mixed-precision {precision}"
    expected, actual = reference("causal", False, flags), observed(2, "causal", False, PRECISIONS[layout])[0]
    tolerance = {"bf16": 2**-8, "fp16": 2**-11}[precision]
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), rtol=tolerance, atol=0)
    receipts = actual["summary"]["receipts"]
    narrow = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert receipts["parameter_dtypes"] == (["float32"] if "fsdp" in layout else sorted([narrow, "float32"]))
    assert narrow in receipts["activation_dtypes"]


@pytest.mark.distributed
def test_receipts_are_measured() -> None:
    summary = _reference("causal", True)["summary"]
    whole, parameters = summary["receipts"], summary["parameters"]
    sharded = observed(2, "causal", True, PAIRS[READ])[0]["summary"]["receipts"]
    assert whole["parameter_bytes"] == sharded["parameter_bytes_whole"] == 8 * parameters
    # Half, plus a little for rows that two does not divide.
    assert 0.5 <= sharded["parameter_bytes"] / whole["parameter_bytes"] < 0.52
    assert 0.5 <= sharded["optimizer_state_bytes"] / whole["optimizer_state_bytes"] < 0.52
    assert sharded["saved_tensor_bytes"] < 0.3 * sharded["saved_tensor_bytes_without"]
    assert sharded["micro_steps"] == 4
    assert whole["micro_steps"] == 1
    assert whole["optimizer_class"] == "torch.optim.adamw.AdamW"


SEEN = 4


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
            if step == SEEN:
                live.__exit__(None, None, None)

    flags = f"--train-iters {SEEN} --micro-batch-size 2 --global-batch-size {4 * micro_batches} --lr 1e-3"
    job = Job(flags.split())
    with (
        mock.patch.object(DDPEngine, "_average_if_last", see_bucket),
        mock.patch.object(DDPEngine, "_backward", see_gradients),
    ):
        receipts = job.fit()["receipts"]
    assert receipts["freed_memory"] == ("kept" if sys.platform == "linux" else "as usual")
    return {"held": held, "sent": sent, "peaks": peaks, "receipt": receipts["gradient_bytes"]}


@pytest.mark.longer
@pytest.mark.distributed
def test_accumulated_gradients_lie_in_the_buckets_alone() -> None:
    for once, thrice in zip(run_in_workers(2, _watch, 1), run_in_workers(2, _watch, 3), strict=True):
        whole = once["receipt"]
        assert thrice["receipt"] == whole
        assert [sum(storages.values()) for storages in thrice["held"]] == [whole] * 3 * SEEN
        places = [set(storages) for storages in thrice["held"]]
        assert places[1:] == [places[1]] * (3 * SEEN - 1)  # DDP rebuilds its buckets before the second
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


@pytest.mark.distributed
def test_gradients_are_exchanged_once_per_step() -> None:
    """Averaging them in each of the four micro batches would give the same numbers and cost four times as much."""
    assert run_in_workers(2, _exchanges) == [4, 4]
