"""The host runs ahead of the device: it reads nothing, and notices in time that a step went wrong.

There is no GPU here. The tests make an engine believe that it must not read, and count every read of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates import OptimizerSpec
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import read_metrics
from tests.support.ahead import FLAGS, CountReads, Line
from tests.support.parity import trained


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines behave as on a GPU."""
    monkeypatch.setattr(SingleEngine, "_supports_async_step", lambda self: True)


@contextmanager
def counted_by_step(job: Line) -> Iterator[list[int]]:
    """Count the reads from the end of each step to the end of the next."""
    found: list[int] = []
    mode = CountReads()
    job.on_step_end = lambda step, result: found.append(mode.reads)  # type: ignore[method-assign]
    with mode:
        yield found
    found[:] = [after - before for before, after in zip([0, *found], found, strict=False)]


@pytest.mark.parametrize("flags", [[], ["--mixed-precision", "fp16"], ["--global-batch-size", "8"]], ids=str)
@pytest.mark.usefixtures("ahead")
def test_no_step_is_read_unless_it_is_logged(flags: list[str]) -> None:
    job = Line([*FLAGS, *flags, "--train-iters", "12", "--log-interval", "4", "--no-save"])
    with counted_by_step(job) as reads:
        lines = trained(job)["lines"]
    logged = [5, 9]  # the reads of a log count for the step after it
    assert all(count == 0 for step, count in enumerate(reads, 1) if step > 1 and step not in logged), reads
    assert all(reads[step - 1] > 0 for step in logged)
    assert [line["step"] for line in lines] == [4, 8, 12]


def test_the_count_sees_a_host_that_reads() -> None:
    job = Line([*FLAGS, "--train-iters", "4", "--no-save"])
    with counted_by_step(job) as reads:
        job.fit()
    assert all(count >= 2 for count in reads[1:])  # loss and norm, in every step of a run on a CPU


class Descending(Line):
    """Its updates grow with the gradient, unlike those of Adam."""

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.SGD, {"lr": 0.01, "fused": True})


FP16 = ["--mixed-precision", "fp16"]


@pytest.mark.parametrize(
    ("kind", "flags"), [(Line, []), (Line, FP16), (Line, ["--clip-grad", "0"]), (Descending, FP16)], ids=str
)
def test_unread_steps_are_those_that_are_read(
    kind: type[Line], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for is_ahead in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(SingleEngine, "_supports_async_step", lambda self, is_ahead=is_ahead: is_ahead)
            job = kind([*FLAGS, *flags, "--train-iters", "10", "--no-save"])
            job.fit()
        runs.append(job)
    for one, other in zip(*(job.results for job in runs), strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(one.grad_norm, other.grad_norm, rtol=1e-5, atol=0)
    assert float(runs[0].results[0].grad_norm) > 1.0  # so that clipping has an effect
    torch.testing.assert_close(runs[0].weights, runs[1].weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("interval", ["1", "100"])
@pytest.mark.usefixtures("ahead")
def test_non_finite_loss_is_heard_of_late_and_has_touched_nothing(interval: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*FLAGS, "--epochs", "2", "--save", str(folder), "--log-interval", interval]
    flags += ["--save-interval", "3" if interval == "1" else "100"]
    job = Line(flags)
    job.poisoned = 7
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    step = int(caught.value.message.split()[1].rstrip(":"))
    assert f"the weights are from after step {step - 1}" in caught.value.message
    assert caught.value.where == f"training samples {sorted(job._run.order.step(step - 1)[0].tolist())}"
    # The run continued until the next step but one, or until the next line or checkpoint.
    begun = len(job.weights)
    assert begun == (step if interval == "1" else step + 1)
    for kept in job.weights[step - 1 :]:
        torch.testing.assert_close(kept, job.weights[step - 2])
    assert all(torch.isfinite(p).all() for p in job.model.parameters())
    lines = [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert lines == [s for s in range(1, step) if s % int(interval) == 0]
    assert max((checkpoint.step_of(path) for path in checkpoint.candidates(folder / "checkpoints")), default=0) < step


@pytest.mark.usefixtures("ahead")
def test_overflow_in_fp16_skips_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer_templates.engines.step import DynamicLossScale

    monkeypatch.setattr("rapidformer_templates.engines.local.DynamicLossScale", lambda: DynamicLossScale(2.0**20))
    job = Line([*FLAGS, "--train-iters", "8", "--mixed-precision", "fp16", "--no-save"])
    job.fit()
    skipped = [bool(result.skipped) for result in job.results]
    assert skipped[0]
    assert not skipped[-1]
    moved = [not torch.equal(a[0], b[0]) for a, b in zip(job.weights[:-1], job.weights[1:], strict=True)]
    assert moved == [not skip for skip in skipped[1:]]


@pytest.mark.usefixtures("ahead")
def test_other_count_is_heard_of_and_has_touched_nothing() -> None:
    class Miscounted(Line):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            losses = (model(batch["x"]) - batch["y"]) ** 2
            return losses.sum(), torch.tensor(4 if len(getattr(self, "results", [])) < 3 else 3)

    job = Miscounted([*FLAGS, "--train-iters", "10", "--log-interval", "10", "--no-save"])
    with pytest.raises(RapidformerError, match="summed over 3 targets, count_targets counted 4"):
        job.fit()
    assert len(job.weights) == 5  # the fourth step was wrong, which the host noticed when the sixth began
    assert torch.equal(job.weights[4][0], job.weights[2][0])
