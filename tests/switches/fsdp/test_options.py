"""The options of FSDP change what it sends, never what it computes."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.switches.fsdp import engine
from tests.support.jobs import OTHERS, CausalJob
from tests.support.lines import Line
from tests.support.parity import Trained, reference, train, trained
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

STEPS = "--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"
FSDP = "--micro-batch-size 1 --fsdp-memory-optimization"  # with two workers: 4 micro batches per step
KEPT = "--no-fsdp-reshard-after-forward"
GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"  # from torch.ops.c10d
GROUPS = 3  # the model's two blocks, and the root with the rest
REDUCED = {
    "bf16": ("bf16", None),
    "bf16, sums in bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "fp16, sums in bf16": ("fp16", "bf16"),
}
"""(precision, type of the sums) by name."""


def _flags(precision: str, reduced: str | None) -> str:
    return f"--mixed-precision {precision}" + (f" --fsdp-reduce-dtype {reduced}" if reduced else "")


class CountingJob(CausalJob):
    """Counts the messages of FSDP in each step and records the types of its sums."""

    def on_train_start(self) -> None:
        self.sent: Counter[str] = Counter()
        self.types: set[str] = set()
        self.steps: list[dict[str, int]] = []

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        self.steps.append(dict(self.sent))
        self.sent.clear()


class _Watch(TorchDispatchMode):
    """Sees the collectives that torch sends, independent of FSDP's own names for them."""

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


class Counted(NamedTuple):
    """A run, the messages of its second step, and the types in which it summed gradients."""

    run: Trained
    sent: dict[str, int]
    types: set[str]


def _count(flags: str, *, double: bool = False) -> Counted:
    job = CountingJob([*f"{STEPS} {FSDP} {flags}".split(), "--lr", "1e-3"])
    job.double = double
    with _Watch(job):
        run = trained(job)
    return Counted(run, job.steps[1], job.types)


def _all_runs(workers: Any, reduced: list[str]) -> dict[str, Counted]:
    """Train in each of two workers and return the runs by their flags."""
    runs = {KEPT: _count(KEPT, double=True), "": _count("--train-iters 2", double=True)}
    return runs | {flags: _count(flags) for flags in (_flags(*REDUCED[name]) for name in reduced)}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Counted]:
    return run_in_workers(2, _all_runs, selected(request, "case"))[0]


@pytest.mark.distributed
def test_parameters_that_stay_whole_change_nothing(runs: Any) -> None:
    expected, actual = reference("causal", True, f"{STEPS} --micro-batch-size 8"), runs[KEPT].run
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), **close)
    torch.testing.assert_close(torch.tensor(actual["evaluations"]), torch.tensor(expected["evaluations"]), **close)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, **close)


@pytest.mark.distributed
def test_gradients_are_sent_once_a_step_and_whole_parameters_are_gathered_once_if_they_stay(runs: Any) -> None:
    # Each of 4 micro batches gathers everything for its forward, and all but the root again for its backward.
    assert runs[""].sent == {GATHER: 4 * (2 * GROUPS - 1), REDUCE: GROUPS}
    assert runs[KEPT].sent == {GATHER: GROUPS, REDUCE: GROUPS}


@pytest.mark.distributed
def test_receipt_shows_what_is_whole_when_the_backward_begins(runs: Any) -> None:
    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().double()
    held = {flags: runs[flags].run["summary"]["receipts"]["parameter_bytes_in_backward"] for flags in (KEPT, "")}
    whole = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    assert whole <= held[KEPT] < 1.01 * whole  # rows that do not divide by two are padded
    assert whole - blocks < held[""] < whole - 0.49 * blocks


@pytest.mark.distributed
@pytest.mark.parametrize("case", by_default(["fp16, sums in bf16"], REDUCED))
def test_gradients_are_summed_in_the_type_that_is_asked_for(case: str, runs: Any) -> None:
    precision, reduced = REDUCED[case]
    name = {None: "float32", "bf16": "bfloat16", "fp16": "float16"}[reduced]
    actual, _, types = runs[_flags(precision, reduced)]
    assert types == {name}
    expected = reference("causal", False, f"{STEPS} --micro-batch-size 8 --mixed-precision {precision}")
    tolerance = 2**-8 if "bf16" in (precision, reduced) else 2**-10
    torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), rtol=tolerance, atol=0)


class SharingJob(CausalJob):
    """Two blocks share one feed-forward."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.transformer.h[1].mlp = model.transformer.h[0].mlp
        return model


class TiedJob(CausalJob):
    """A block and the last norm have one bias, and two blocks have one matrix in different modules."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        first, second = model.transformer.h
        first.ln_1.bias = model.transformer.ln_f.bias
        second.attn.c_proj.weight = first.attn.c_proj.weight
        return model


OTHERS |= {"sharing": SharingJob, "tied": TiedJob}
SHARED = "--train-iters 3 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"


def _share(workers: Any, job: str, flags: str) -> Trained:
    return train(job, True, f"{SHARED} {flags}")


SHARING = [("sharing", KEPT), ("tied", ""), ("sharing", ""), ("sharing", "--checkpoint-activations")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "flags"),
    by_default(SHARING[:2], SHARING),
)
def test_what_several_blocks_share_is_of_none_of_their_units(job: str, flags: str) -> None:
    expected = reference(job, True, f"{SHARED} --micro-batch-size 8")
    for run in run_in_workers(2, _share, job, f"{FSDP} {flags}"):
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(expected["curve"]), **close)
        assert run["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(run["weights"][name], weight, **close)


class Squeezed(torch.nn.Module):
    """Returns a view of a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze(-1)


class ViewJob(Line):
    def build_model(self) -> torch.nn.Module:
        return Squeezed()

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"].squeeze(-1))


class InPlaceJob(ViewJob):
    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = model(batch["x"])
        outputs += 1
        return torch.nn.functional.mse_loss(outputs, batch["y"].squeeze(-1))


VIEW_FLAGS = ["--lr", "0.1", "--train-iters", "2", "--fsdp-memory-optimization", "--device", "cpu", "--no-save"]


def _refusal_of_a_changed_view(workers: Any) -> str:
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        with pytest.raises(RapidformerError) as error:
            InPlaceJob(VIEW_FLAGS).fit()
        return str(error.value)


def _view_warnings(workers: Any, pattern: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(engine, "VIEW_WARNING", pattern):
        warnings.simplefilter("always")
        ViewJob(
            ["--lr", "0.1", "--train-iters", "2", "--fsdp-memory-optimization", "--device", "cpu", "--no-save"]
        ).fit()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.distributed
def test_no_worker_warns_about_views() -> None:
    assert run_in_workers(2, _view_warnings, engine.VIEW_WARNING) == [[], []]
    assert all(run_in_workers(2, _view_warnings, "another message")), "torch no longer warns: remove the filter"


@pytest.mark.distributed
def test_a_view_that_is_changed_in_place_is_refused() -> None:
    """Otherwise FSDP would lose the gradients without a word, and the run would train nothing."""
    for message in run_in_workers(2, _refusal_of_a_changed_view):
        assert "the output of Squeezed is a view and was changed in place" in message
