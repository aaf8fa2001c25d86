"""The host runs ahead of the device: it reads nothing, and notices in time that a step went wrong or overflowed.

There is no GPU here. The tests make an engine believe that it must not read, and count every read of a tensor.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates import OptimizerSpec
from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.current_batch import rows_of, watch_positions
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.step import DynamicLossScale
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import read_metrics
from tests.support.ahead import FLAGS, CountReads, Line
from tests.support.jobs import CausalJob
from tests.support.mask_hooks import HOOKS, _batch, _model, job_of
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


@pytest.mark.usefixtures("ahead")
def test_no_batch_of_an_evaluation_is_read() -> None:
    class Watched(CausalJob):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            if not model.training:
                seen.append(mode.reads)
            return super().compute_loss(model, batch)

        def count_targets(self, batch: Any) -> float:
            return float((batch["labels"].numpy()[:, 1:] != -100).sum())  # on the host, and no operation of torch

    seen, mode = list[int](), CountReads()
    with mode:
        Watched([*FLAGS, "--train-iters", "1", "--no-save"]).fit()
    assert len(seen) > 2
    assert {later - earlier for earlier, later in pairwise(seen)} == {1}  # the tokens, on the host


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


OVERFLOWS = "--lr 1e-3 --train-iters 6 --micro-batch-size 4 --log-interval 1 --mixed-precision fp16"


def test_scale_halves_on_overflow_and_grows_after_good_steps() -> None:
    scale = DynamicLossScale(1024.0, growth_interval=3)
    scale.update(overflow=True)
    assert scale.scale == 512
    for expected in (512, 512, 1024, 1024):
        scale.update(overflow=False)
        assert scale.scale == expected
    scale.update(overflow=True)
    restored = DynamicLossScale()
    restored.load_state(scale.state())
    assert restored.state() == scale.state() == {"scale": 512.0, "good_steps": 0}


class Overflowing(CausalJob):
    """Starts with a loss scale beyond the range of fp16, and records the weights before each step."""

    def on_train_start(self) -> None:
        self.weights: list[torch.Tensor] = [self.flat()]

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()

    def on_step_end(self, step: int, result: Any) -> None:
        self.weights.append(self.flat())


@pytest.mark.parametrize(("start", "is_ahead"), [(2.0**127, False), (65536.0, False), (2.0**20, True)])
def test_overflowed_steps_are_skipped_and_leave_the_weights(
    start: float, is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleEngine, "_supports_async_step", lambda self: is_ahead)
    monkeypatch.setattr(
        "rapidformer_templates.engines.local.DynamicLossScale", lambda: DynamicLossScale(start, growth_interval=2000)
    )
    job = Overflowing([*OVERFLOWS.split(), "--save", str(tmp_path / "run")])
    job.fit()
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    skipped = [line["skipped"] for line in lines]
    assert [line["grad_norm"] is None for line in lines] == skipped
    moved = [not torch.equal(a, b) for a, b in zip(job.weights[:-1], job.weights[1:], strict=True)]
    assert moved == [not skip for skip in skipped]
    assert skipped[0] == (start > 65536)
    assert all(torch.isfinite(weights).all() for weights in job.weights)


@pytest.mark.parametrize("kind", ["no mask", "full mask", "padded", "packed"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_forward_reads_nothing_and_is_the_same(name: str, kind: str) -> None:
    model = _model(name)
    batch = _batch(kind)
    microbatch = _looked_at(batch)
    with torch.no_grad(), CountReads() as plain:
        expected = model(**batch).logits
    watch_positions(model)
    with torch.no_grad(), rows_of(microbatch, batch, answers=True), CountReads() as counted:
        actual = model(**batch).logits
    assert counted.reads == 0
    mask = batch.get("attention_mask")
    assert microbatch.shown_tokens == (int(mask.sum()) if mask is not None and mask.ndim == 2 else None)
    assert (plain.reads > 0) == (kind in ("full mask", "padded") or name in ("gpt2", "llama"))
    assert torch.equal(actual, expected)


def _looked_at(batch: Any) -> MicroBatch:
    microbatch = MicroBatch(batch, [0, 1])
    microbatch.inspect_masks()
    return microbatch


@pytest.mark.parametrize("hook", HOOKS)
def test_what_the_hook_gives_the_model_is_what_counts(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead trains to the same last digit as one that reads everything."""
    runs = []
    for ahead in (False, True):
        monkeypatch.setattr(SingleEngine, "_supports_async_step", lambda self, ahead=ahead: ahead)
        runs.append(job_of(hook))
    assert runs[0].losses == runs[1].losses
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_answers_are_of_one_thread() -> None:
    model = _model("llama")
    watch_positions(model)
    padded, full = _batch("padded"), _batch("full mask")
    with torch.no_grad():
        expected = model(**padded).logits
    found: list[torch.Tensor] = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(**padded).logits)

    with rows_of(_looked_at(full), full, answers=True):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert torch.equal(found[0], expected)
