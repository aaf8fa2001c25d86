"""ZeRO in all its forms follows the one-process run: loss, gradient norm, weights, and held memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates import Data
from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.models.blocks import width_of
from tests.support.jobs import CausalJob
from tests.support.machine import why_no_nvme
from tests.support.parity import assert_follows, reference, train, weights_apart
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

CLIP = 0.1
STEPS = f"--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1"
LAYOUTS = {
    "zero-1": "--zero-1-memory-optimization --micro-batch-size 2",
    "zero-2": "--zero-2-memory-optimization --micro-batch-size 2",
    "zero-3": "--zero-3-memory-optimization --micro-batch-size 2",
    "zero-3-all-cut": "--zero-3-memory-optimization --zero-3-param-persistence-threshold 0 --micro-batch-size 2",
    "zero-3-checkpointed": (
        "--zero-3-memory-optimization --zero-3-param-persistence-threshold 0 --micro-batch-size 1"
        " --checkpoint-activations"
    ),
    "zero-1-offload": "--zero-1-memory-optimization --micro-batch-size 2 --cpu-offload",
    "zero-2-offload": "--zero-2-memory-optimization --micro-batch-size 2 --cpu-offload",
    "zero-3-offload": "--zero-3-memory-optimization --micro-batch-size 4 --cpu-offload",
}
BF16 = ("zero-1", "zero-2", "zero-3-all-cut", "zero-2-offload", "zero-3-offload")
KINDS = ("causal", "frozen")  # a causal model with tied embeddings, and a classifier with frozen parameters
CASES = {f"{job}-{layout}": (job, layout) for job in KINDS for layout in LAYOUTS}
LONGER = {"zero-1-offload", "zero-3", "zero-3-checkpointed", "zero-3-offload"}
"""For ``make test-longer``. In the matrix of resumes ZeRO-1 and ZeRO-3 with offload follow one process, and the
covering table has ZeRO-3 with checkpointed blocks. ZeRO-3 runs with all parameters cut."""
SHORT = [case for case, (job, layout) in CASES.items() if job == "causal" and layout not in LONGER]
"""Cases that run by default."""


def _train_all(workers: Any, folder: str, cases_of: list[str], narrow: list[str]) -> dict[tuple[str, str], Any]:
    cases = [(job, name, LAYOUTS[name]) for job, name in map(CASES.__getitem__, cases_of)]
    cases += [("causal", f"{name}-bf16", f"{LAYOUTS[name]} --mixed-precision bf16") for name in narrow]
    if not why_no_nvme():
        cases += [("wide", "nvme", f"--zero-3-memory-optimization --micro-batch-size 2 --nvme-path {folder}/nvme")]
    results: dict[tuple[str, str], Any] = {
        (job, name): train(job, False, f"{STEPS} {flags}") for job, name, flags in cases
    }
    return results | {("causal", "gathered"): _gathered()} | _failures()


class _CountingJob(CausalJob):
    """Counts the elements that each step gathers, and those that are gathered before the first forward."""

    def build_data(self) -> Data:
        self.gathered, self.steps, self.in_setup = 0, [], -1
        return super().build_data()

    def compute_loss(self, model: Any, batch: Any) -> Any:
        if self.in_setup < 0:
            self.in_setup = self.gathered
        return super().compute_loss(model, batch)

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        self.steps.append(self.gathered)
        self.gathered = 0


class _Watch(TorchDispatchMode):
    """Sees the collectives that torch sends."""

    def __init__(self, job: _CountingJob) -> None:
        super().__init__()
        self.job = job

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ == "_allgather_base_":
            self.job.gathered += args[0].numel()
        return func(*args, **kwargs or {})


def _gathered() -> tuple[int, float]:
    """Return the elements that are gathered before the first forward, and the relative number in the fourth step.

    The latter is divided by all parameters in each micro batch of the step.
    """
    job = _CountingJob([*f"{STEPS} {LAYOUTS['zero-3-all-cut']} --train-iters 4".split(), "--lr", "1e-3"])
    with _Watch(job):
        job.fit()
    parameters = sum(p.numel() for p in CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().parameters())
    return job.in_setup, job.steps[-1] / (job.plan.sizes.accumulation * parameters)


def _failures() -> dict[tuple[str, str], Any]:
    """Train runs that must end with the same error on both workers, and return these errors."""
    ends: dict[tuple[str, str], Any] = {}
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        for job in ("unreached", "broken"):
            for name in ("zero-2", "zero-3"):
                try:
                    train(job, False, f"{STEPS} {LAYOUTS[name]}")
                except RapidformerError as error:
                    ends[job, name] = error
    return ends


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """The results of both workers from one group."""
    cases = sorted({*selected(request, "case"), *(f"causal-{layout}" for layout in selected(request, "layout"))})
    return run_in_workers(2, _train_all, str(tmp_path_factory.mktemp("runs")), cases, selected(request, "narrow"))


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    flags = f"{STEPS} --micro-batch-size 8"
    found = {job: reference(job, False, flags) for job in (*KINDS, *(() if why_no_nvme() else ("wide",)))}
    found["bf16"] = reference("causal", False, f"{flags} --mixed-precision bf16")
    return found


@pytest.mark.parametrize("case", by_default(SHORT, CASES))
def test_zero_follows_one_process(case: str, references: Any, runs: Any) -> None:
    job, layout = CASES[case]
    _assert_like(references[job], runs[0][job, layout])


def test_nvme_follows_one_process_and_keeps_no_state_in_memory(references: Any, runs: Any) -> None:
    if why := why_no_nvme():
        pytest.skip(why)
    _assert_like(references["wide"], runs[0]["wide", "nvme"])
    for held in runs[0]["wide", "nvme"]["summary"]["receipts"]["held_bytes_by_rank"]:
        # Partitions below a megabyte (biases and norms) stay. The whole state would be three times the parameters.
        assert held["optimizer_state_bytes"] < 0.05 * held["parameter_bytes"]


WIDTHS = ("zero-1", "zero-2", "zero-3", "zero-3-all-cut", "zero-3-offload")


@pytest.mark.parametrize("layout", by_default({*WIDTHS} - LONGER, WIDTHS))
def test_deepspeed_runs_with_buckets_of_the_models_width(layout: str, runs: Any) -> None:
    settings = runs[0]["causal", layout]["summary"]["receipts"]["zero_optimization"]
    assert (settings["reduce_bucket_size"], settings["allgather_bucket_size"]) == (2**18, 2**18)
    if layout.startswith("zero-3"):
        width = width_of(CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make())
        kept_whole = 0 if layout == "zero-3-all-cut" else 10 * width
        assert settings["prefetch_bucket_size"] == 2**18 * 9 // 10
        assert settings["param_persistence_threshold"] == kept_whole


def _assert_like(expected: Any, actual: Any) -> None:
    assert_follows(actual, expected, weights=(1e-5, 5e-6))
    assert len(expected["evaluations"]) == 3
    assert max(norm for _, norm in expected["curve"]) > 2 * CLIP  # so that clipping has an effect


@pytest.mark.parametrize("narrow", by_default(["zero-2-offload"], BF16))
def test_bf16_follows_one_process_of_bf16(narrow: str, references: Any, runs: Any) -> None:
    actual = runs[0]["causal", f"{narrow}-bf16"]
    torch.testing.assert_close(
        torch.tensor(actual["curve"]), torch.tensor(references["bf16"]["curve"]), rtol=2**-8, atol=0
    )
    assert actual["summary"]["receipts"]["parameter_dtypes"] == ["bfloat16"]
    # The saved masters differ from the reference's weights by less than the rounding of the format.
    expected = references["bf16"]["weights"]
    assert 0 < weights_apart(actual["weights"], expected) < 2**-8


@pytest.mark.parametrize("layout", by_default(LAYOUTS.keys() - LONGER, LAYOUTS))
def test_offloaded_adam_is_deepspeeds(layout: str, runs: Any) -> None:
    used = runs[0]["causal", layout]["summary"]["receipts"]["optimizer_class"]
    assert used.endswith("DeepSpeedCPUAdam" if "offload" in layout else "torch.optim.adamw.AdamW")


@pytest.mark.parametrize("name", ["zero-2", "zero-3"])
def test_parameters_that_the_loss_does_not_reach_are_refused(name: str, runs: Any) -> None:
    for rank in (0, 1):
        assert "spare.weight, spare.bias" in runs[rank]["unreached", name].message


@pytest.mark.parametrize("name", ["zero-2", "zero-3"])
def test_an_infinite_loss_ends_the_run_on_every_worker(name: str, runs: Any) -> None:
    for rank in (0, 1):
        error = runs[rank]["broken", name]
        assert isinstance(error, NonFiniteLoss)
        assert "step 3" in error.message


@pytest.mark.parametrize("zero_stage", by_default([3], [1, 2, 3]))
def test_alone_zero_is_plain_training(zero_stage: int, references: Any) -> None:
    flags = f"{STEPS} --micro-batch-size 4 --zero-{zero_stage}-memory-optimization"
    _assert_like(references["causal"], train("causal", False, flags))


def test_what_fits_is_gathered_once_for_forward_and_backward(runs: Any) -> None:
    """By default a parameter may stay whole until its backward. A step that gathers twice does not know its order."""
    in_setup, in_step = runs[0]["causal", "gathered"]
    assert in_setup == 0
    assert 1 <= in_step < 1.2
