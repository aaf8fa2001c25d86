"""Numbers of a line of metrics: means since the line before it, norms by layer, and the samples of infinite losses."""

import math
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer_templates.errors import NonFiniteLoss
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.run import log
from rapidformer_templates.run.folder import read_metrics
from tests.support import parallel_jobs
from tests.support.jobs import DeepJob
from tests.support.lines import Died, Line, Mortal
from tests.support.mixtures import MixtralJob
from tests.support.parallel_jobs import JOBS
from tests.support.parity import Trained, observed, reference, trained
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

FLAGS = "--lr 1e-2 --train-iters 8 --micro-batch-size 2 --global-batch-size 8 --log-interval 3"
LINES = [(0, 3), (3, 6), (6, 8)]
"""The steps of each line: after the first one, up to the second one."""


class Recorded(DeepJob):
    """Keeps the values of each step."""

    def on_step_end(self, step: int, result: Any) -> None:
        values = {"loss": result.loss, **result.measured}
        self.steps = [*getattr(self, "steps", []), {name: float(value) for name, value in values.items()}]


class RecordedMixture(Recorded, MixtralJob):
    """Keeps the auxiliary losses of each step, too."""


def means(workers: Any, flags: str, kind: type[Recorded]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    job = kind(f"{FLAGS} {flags}".split())
    lines = [line for line in trained(job)["lines"] if "loss" in line]
    return job.steps, lines


def assert_means(steps: list[dict[str, float]], lines: list[dict[str, float]]) -> None:
    assert len({step["loss"] for step in steps}) == 8
    assert [line["step"] for line in lines] == [last for _, last in LINES]
    for line, (first, last) in zip(lines, LINES, strict=True):
        for name in steps[0]:
            assert line[name] == pytest.approx(np.mean([step[name] for step in steps[first:last]]), rel=1e-12), name


ENGINES = ["", "--fsdp-memory-optimization", "--zero-2-memory-optimization", "--pipeline-model-parallel-size 2"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("flags", by_default(["--pipeline-model-parallel-size 2"], ENGINES))
def test_a_line_has_the_mean_loss_since_the_line_before_it(flags: str) -> None:
    for steps, lines in run_in_workers(2, means, flags, Recorded):
        assert_means(steps, lines)


@pytest.mark.slow
def test_auxiliary_losses_and_accumulated_steps_are_means_too() -> None:
    steps, lines = means(None, "--moe-loss-coeff 0.01", RecordedMixture)
    assert {"balance_loss", "z_loss"} < steps[0].keys()
    assert_means(steps, lines)


@pytest.mark.parametrize("unread", [2, log.MAX_UNREAD])
def test_a_resume_in_an_interval_has_the_same_means(
    unread: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_UNREAD", unread)
    flags = "--lr 0.1 --train-iters 10 --micro-batch-size 4 --log-interval 4 --save-interval 3"
    Mortal([*flags.split(), "--save", str(tmp_path / "whole")]).fit()
    killed = Mortal([*flags.split(), "--save", str(tmp_path / "killed")])
    killed.dies_after = 7  # the checkpoint of step 6 has half of the second line
    with pytest.raises(Died):
        killed.fit()
    Mortal([*flags.split(), "--save", str(tmp_path / "killed"), "--resume"]).fit()
    whole, resumed = (
        [(line["step"], line["loss"]) for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "killed")
    )
    assert whole == resumed
    assert [step for step, _ in whole] == [4, 8, 10]


class Infinite(Line):
    """Has an infinite loss in step 2, which fp16 skips."""

    def on_step_end(self, step: int, result: Any) -> None:
        self.losses = [*getattr(self, "losses", []), float(result.loss)]

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        loss = super().compute_loss(model, batch)
        return loss * math.inf if len(getattr(self, "losses", [])) == 1 else loss


def test_steps_that_are_not_finite_do_not_count(tmp_path: Path) -> None:
    flags = ["--lr", "0.1", "--train-iters", "4", "--micro-batch-size", "4", "--log-interval", "4"]
    job = Infinite([*flags, "--mixed-precision", "fp16", "--save", str(tmp_path / "run")])
    job.fit()
    assert not math.isfinite(job.losses[1])
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["loss"] == pytest.approx(np.mean([job.losses[index] for index in (0, 2, 3)]), rel=1e-12)
    with pytest.raises(NonFiniteLoss):
        Infinite([*flags, "--no-save"]).fit()
    means = log.Means({})
    means.add({"loss": torch.tensor(float("inf"))})
    assert math.isnan(means.take()["loss"]), "the mean of no step is not a number"


POISONED = 6

NOT_FINITE = {
    "DDP": "",
    "FSDP": "--fsdp-memory-optimization",
    "divided update": "--use-distributed-optimizer",
    "pipeline": "--pipeline-model-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2",
}
if "deepspeed" in installed_packages():
    NOT_FINITE |= {"ZeRO-2": "--zero-2-memory-optimization", "ZeRO-3": "--zero-3-memory-optimization"}


class Poisoned(JOBS["gpt2-4-tied"]):  # type: ignore[misc]
    """The loss of a batch with sample :data:`POISONED` is infinite."""

    has_met = False

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        tokens = torch.as_tensor(self.data.train[POISONED]["input_ids"])
        loss = super().compute_loss(model, batch)
        if any(torch.equal(row[: len(tokens)], tokens) for row in batch["input_ids"]):
            self.has_met = True
            return loss * torch.inf
        return loss


def _fails(workers: Any, layout: str) -> tuple[bool, str | None]:
    flags = "--micro-batch-size 1 --global-batch-size 4 --train-iters 40 --lr 1e-3 --no-save"
    job = Poisoned([*flags.split(), *NOT_FINITE[layout].split()])
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    return job.has_met, caught.value.where


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(["DDP"], NOT_FINITE))
def test_the_worker_and_its_sample_of_an_infinite_loss_are_named(layout: str) -> None:
    told = run_in_workers(2, _fails, layout)
    (where,) = {where for _, where in told}
    met = [rank for rank, (has_met, _) in enumerate(told) if has_met]
    if layout == "tensor":  # both workers compute the loss, so that none of them is wrong alone
        assert met == [0, 1]
        assert re.fullmatch(rf"training samples \[(\d+, )*{POISONED}(, \d+)*\]", str(where))
    else:
        rank = 1 if layout == "pipeline" else met[0]  # the last stage computes the loss
        assert where == f"training samples [{POISONED}] of worker {rank} on {socket.gethostname()}"


LAYER_FLAGS = "--log-layer-grad-norms --train-iters 3 --global-batch-size 8 --clip-grad 0.5 --micro-batch-size 2"
JOB = "llama-4-untied"
EXPERTS = "--num-experts 4 --moe-capacity-factor 4"
FP16 = "--mixed-precision fp16"
LAYERS = ["model.embed_tokens", *(f"model.layers.{number}" for number in range(4)), "model.norm", "lm_head"]
assert JOB in parallel_jobs.JOBS

LAYOUTS: dict[str, tuple[int, str]] = {
    "experts": (2, f"{EXPERTS} --expert-parallel"),
    "fp16": (2, FP16),
    "fp16, fsdp": (2, f"{FP16} --fsdp-memory-optimization"),
    "tensor 2 × pipeline 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pipeline 2, fp16": (4, f"--pipeline-model-parallel-size 2 --zero-2-memory-optimization {FP16}"),
}
"""Number of workers and flags."""
if "deepspeed" in installed_packages():
    LAYOUTS |= {f"zero-{stage}, fp16": (2, f"--zero-{stage}-memory-optimization {FP16}") for stage in (2, 3)}


def _norms(run: Trained) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name.startswith("grad_norm")}
            for line in run["lines"] if "loss" in line]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["fp16, fsdp"], LAYOUTS))
def test_norms_of_layers_are_those_of_one_process(layout: str) -> None:
    count, flags = LAYOUTS[layout]
    same = FP16 if "fp16" in layout else EXPERTS if layout == "experts" else ""
    found = _norms(observed(count, JOB, False, f"{LAYER_FLAGS} {flags}")[0])
    expected = _norms(reference(JOB, False, f"{LAYER_FLAGS} {same}"))
    assert len(expected) == 3
    rel = 2e-2 if "fp16" in layout else 1e-4
    for line, wanted in zip(found, expected, strict=True):
        assert sorted(line) == sorted(wanted) == sorted(["grad_norm", *(f"grad_norm/{layer}" for layer in LAYERS)])
        assert line == pytest.approx(wanted, rel=rel)
        together = math.hypot(*(value for name, value in line.items() if name != "grad_norm"))
        assert together == pytest.approx(line["grad_norm"], rel=1e-3 if "fp16" in layout else 1e-5)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_flag_changes_nothing_else() -> None:
    plain = LAYER_FLAGS.replace("--log-layer-grad-norms ", "")
    assert reference(JOB, False, LAYER_FLAGS)["curve"] == reference(JOB, False, plain)["curve"]
