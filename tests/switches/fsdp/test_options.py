"""The options of FSDP change what it sends, never what it computes."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.switches.fsdp import engine
from tests.support.collectives import GATHER, REDUCE, count_collectives
from tests.support.jobs import OTHERS, CausalJob
from tests.support.lines import Line
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

STEPS = "--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1"
FSDP = "--micro-batch-size 1 --fsdp-memory-optimization"  # with two workers: 4 micro batches per step
KEPT = "--no-fsdp-reshard-after-forward"
ONCE = "--no-fsdp-reduce-every-micro-batch"
GROUPS = 3  # the model's two blocks, and the root with the rest
REDUCED = {
    "bf16": ("bf16", None),
    "bf16, sums in bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "fp16, sums in bf16": ("fp16", "bf16"),
}
"""(precision, type of the sums) by name."""


class Counted(NamedTuple):
    """A run, the messages of its second step, and the types in which it summed gradients."""

    run: Trained
    sent: dict[str, int]
    types: set[str]


def _count(workers: Any, flags: str, double: bool) -> Counted:
    job = CausalJob([*f"{STEPS} {FSDP} {flags}".split(), "--lr", "1e-3"])
    job.double = double
    run, seen = count_collectives(job)
    messages, _, types = seen[2]
    return Counted(run, {name: messages[name, 2] for name in (GATHER, REDUCE)}, types)


@pytest.fixture(scope="module")
def runs() -> dict[str, Counted]:
    return {flags: run_in_workers(2, _count, flags, True)[0] for flags in (KEPT, ONCE, "--train-iters 2")}


@pytest.mark.parametrize("flags", [KEPT, ONCE])
def test_what_stays_whole_changes_nothing(flags: str, runs: dict[str, Counted]) -> None:
    assert_follows(runs[flags].run, reference("causal", True, f"{STEPS} --micro-batch-size 8"), *EXACT)


def test_gradients_are_sent_once_a_step_and_parameters_are_gathered_once_if_they_stay_whole(runs: Any) -> None:
    # Each of 4 micro batches gathers everything for its forward, and all but the root again for its backward.
    assert runs["--train-iters 2"].sent == {GATHER: 4 * (2 * GROUPS - 1), REDUCE: 4 * GROUPS}
    assert runs[ONCE].sent == {GATHER: 4 * (2 * GROUPS - 1), REDUCE: GROUPS}
    assert runs[KEPT].sent == {GATHER: GROUPS, REDUCE: 4 * GROUPS}


def test_only_shards_of_gradients_are_kept_between_micro_batches(runs: Any) -> None:
    """With one sum per step, each worker keeps the gradients of the whole model."""
    elements = sum(p.numel() for p in CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().parameters())
    between = {flags: runs[flags].run["summary"]["receipts"]["whole_gradients_between"] for flags in runs}
    assert between == {"--train-iters 2": 0, KEPT: 0, ONCE: elements}


def test_receipt_shows_what_is_whole_when_the_backward_begins(runs: Any) -> None:
    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().double()
    held = {flags: runs[flags].run["summary"]["receipts"]["parameter_bytes_in_backward"] for flags in runs}
    whole = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    assert whole <= held[KEPT] < 1.01 * whole  # rows that do not divide by two are padded
    assert whole - blocks < held["--train-iters 2"] < whole - 0.49 * blocks


@pytest.mark.parametrize("case", by_default(["fp16, sums in bf16"], REDUCED))
def test_gradients_are_summed_in_the_type_that_is_asked_for(case: str) -> None:
    precision, reduced = REDUCED[case]
    name = {None: "float32", "bf16": "bfloat16", "fp16": "float16"}[reduced]
    reduce = f"--fsdp-reduce-dtype {reduced}" if reduced else ""
    actual, _, types = run_in_workers(2, _count, f"--mixed-precision {precision} {reduce}", False)[0]
    assert types == {name}
    expected = reference("causal", False, f"{STEPS} --micro-batch-size 8 --mixed-precision {precision}")
    tolerance = 2**-8 if "bf16" in (precision, reduced) else 2**-10
    assert_close(actual["curve"], expected["curve"], tolerance, 0)


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


SHARING = [("sharing", KEPT), ("tied", ""), ("sharing", ""), ("sharing", "--checkpoint-activations")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "flags"),
    by_default(SHARING[:2], SHARING),
)
def test_what_several_blocks_share_is_of_none_of_their_units(job: str, flags: str) -> None:
    expected = reference(job, True, f"{SHARED} --micro-batch-size 8")
    for run in observed(2, job, True, f"{SHARED} {FSDP} {flags}"):
        assert_follows(run, expected, 1e-10, 1e-10)


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
        ViewJob(VIEW_FLAGS).fit()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


def test_no_worker_warns_about_views() -> None:
    assert run_in_workers(2, _view_warnings, engine.VIEW_WARNING) == [[], []]
    assert all(run_in_workers(2, _view_warnings, "another message")), "torch no longer warns: remove the filter"


def test_a_view_that_is_changed_in_place_is_refused() -> None:
    """Otherwise FSDP would lose the gradients without a word, and the run would train nothing."""
    for message in run_in_workers(2, _refusal_of_a_changed_view):
        assert "the output of Squeezed is a view and was changed in place" in message
