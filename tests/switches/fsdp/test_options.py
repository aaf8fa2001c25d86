"""What can be chosen about FSDP changes what it sends, never what it computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.switches.fsdp.engine import FSDPEngine
from tests.support.jobs import CausalJob, train
from tests.support.worker_group import run_in_workers

STEPS = "--train-iters 10 --eval-interval 4 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"
FSDP = "--micro-batch-size 1 --fsdp-memory-optimization"  # with two workers: 4 micro batches a step
KEPT = "--no-fsdp-reshard-after-forward"
GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"  # of torch.ops.c10d
GROUPS = 3  # the model's two blocks, and the root with the rest
REDUCED = [("bf16", None), ("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "bf16")]


def _flags(precision: str, reduced: str | None) -> str:
    return f"--mixed-precision {precision}" + (f" --fsdp-reduce-dtype {reduced}" if reduced else "")


class CountingJob(CausalJob):
    """Counts what FSDP sends in each step, and in which types it sums."""

    def on_train_start(self) -> None:
        self.sent: Counter[str] = Counter()
        self.types: set[str] = set()
        self.steps: list[dict[str, int]] = []

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        self.steps.append(dict(self.sent))
        self.sent.clear()


class _Watch(TorchDispatchMode):
    """Sees the collectives as torch sends them, whatever FSDP calls them by."""

    def __init__(self, job: CountingJob) -> None:
        super().__init__()
        self.job = job

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in (GATHER, REDUCE):
            self.job.sent[name] += 1
            if name == REDUCE:
                self.job.types.add(str(args[1].dtype).removeprefix("torch."))
        return func(*args, **kwargs or {})


def _count(flags: str) -> CountingJob:
    job = CountingJob([*f"{STEPS} --train-iters 3 {FSDP} {flags}".split(), "--lr", "1e-3"])
    with _Watch(job), mock.patch.object(FSDPEngine, "setup", autospec=True, side_effect=FSDPEngine.setup) as setup:
        job.fit()
    job.receipts = setup.call_args.args[0].receipts
    return job


def _all_runs(workers: Any, folder: str) -> dict[Any, Any]:
    """In each of two workers."""
    counted = {flags: _count(flags) for flags in ("", KEPT)}
    runs: dict[Any, Any] = {
        "kept": train("causal", True, f"{STEPS} {FSDP} {KEPT}", f"{folder}/kept"),
        "sent": {flags: job.steps[1] for flags, job in counted.items()},
        "receipts": {flags: job.receipts["parameter_bytes_in_backward"] for flags, job in counted.items()},
    }
    for precision, reduced in REDUCED:
        flags = _flags(precision, reduced)
        runs[precision, reduced] = train("causal", False, f"{STEPS} {FSDP} {flags}", f"{folder}/{precision}-{reduced}")
        runs["types", precision, reduced] = _count(flags).types
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return run_in_workers(2, _all_runs, str(tmp_path_factory.mktemp("runs")))[0]


@pytest.mark.distributed
def test_parameters_that_stay_whole_change_nothing(runs: Any, tmp_path: Path) -> None:
    expected, actual = train("causal", True, f"{STEPS} --micro-batch-size 8", str(tmp_path / "one")), runs["kept"]
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), **close)
    torch.testing.assert_close(torch.tensor(actual["evaluations"]), torch.tensor(expected["evaluations"]), **close)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, **close)


@pytest.mark.distributed
def test_gradients_are_sent_once_a_step_and_whole_parameters_are_gathered_once_if_they_stay(runs: Any) -> None:
    # Of 4 micro batches each gathers everything for its forward, and all but the root again for its backward.
    assert runs["sent"][""] == {GATHER: 4 * (2 * GROUPS - 1), REDUCE: GROUPS}
    assert runs["sent"][KEPT] == {GATHER: GROUPS, REDUCE: GROUPS}


@pytest.mark.distributed
def test_receipt_shows_what_is_whole_when_the_backward_begins(runs: Any) -> None:
    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make()
    whole = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    assert whole <= runs["receipts"][KEPT] < 1.01 * whole  # rows that do not divide by two are padded
    assert whole - blocks < runs["receipts"][""] < whole - 0.49 * blocks


@pytest.mark.distributed
@pytest.mark.parametrize(("precision", "reduced"), REDUCED)
def test_gradients_are_summed_in_the_type_that_is_asked_for(
    precision: str, reduced: str | None, runs: Any, tmp_path: Path
) -> None:
    name = {None: "float32", "bf16": "bfloat16", "fp16": "float16"}[reduced]
    assert runs["types", precision, reduced] == {name}
    flags = f"{STEPS} --micro-batch-size 8 --mixed-precision {precision}"
    expected, actual = train("causal", False, flags, str(tmp_path / "one")), runs[precision, reduced]
    tolerance = 2**-8 if "bf16" in (precision, reduced) else 2**-10
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), rtol=tolerance, atol=0)
