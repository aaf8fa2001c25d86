"""Averaged weights equal torch's own average in one process, and after deaths and resumes.

``test_features_of_a_step.py`` has the engines.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rapidformer_templates.engines.optimizer_state import AVERAGE
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.run.checkpoint.format import Reader
from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import KEEP_FIRST, DeepJob, FallingMetric
from tests.support.lines import Died
from tests.support.parity import trained
from tests.support.worker_pool import run_in_workers

DECAY = 0.7
STEPS = "--train-iters 4 --global-batch-size 8 --log-interval 1 --eval-interval 2 --lr 1e-2 --keep-checkpoints 9"
ON = f"--ema-decay {DECAY}"
ENGINES = {
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization",
    "distributed": "--micro-batch-size 4 --use-distributed-optimizer",
}
NEEDS_DEEPSPEED = pytest.mark.skipif("deepspeed" not in installed_packages(), reason="deepspeed is not installed")


class Averaging(DeepJob):
    """The reference: torch averages the model after each step. The average is evaluated and stored."""

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        if step == 1:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.average.update_parameters(self.model)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        losses, targets = 0.0, 0.0
        with torch.no_grad():
            for sample in self.data.valid:
                batch = self.data.collate([sample])
                if count := float(self.count_targets(batch)):
                    losses += count * float(self.average.module.eval()(**batch).loss)
                    targets += count
        self.losses = [*getattr(self, "losses", []), losses / targets]


def run(flags: str, folder: Path | str, job: type[DeepJob] = DeepJob) -> dict[str, Any]:
    """Train with files, to compare the export. A resumed run also has the evaluations before its death."""
    found = trained(job([*f"{STEPS} {flags}".split(), "--save", str(folder)]))
    lines = read_metrics(Path(folder) / "metrics.jsonl")
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    exported = load_file(Path(folder) / "export" / "model.safetensors")
    return {**found, "evaluations": evaluations, "exported": exported}


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    job = Averaging(f"{STEPS} --micro-batch-size 8".split())
    curve = trained(job)["curve"]
    average = {name: p for name, p in job.average.module.state_dict().items() if name != "lm_head.weight"}
    return {"curve": curve, "evaluations": job.losses, "exported": average}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run of one process."""
    return run(f"{ON} --micro-batch-size 8", tmp_path_factory.mktemp("averaged"))


def assert_follows(found: dict[str, Any], wanted: dict[str, Any], *, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(wanted["curve"]), rtol=rtol, atol=1e-5)
    assert found["evaluations"] == pytest.approx(wanted["evaluations"], rel=rtol)
    for name, weight in wanted["exported"].items():
        torch.testing.assert_close(found["exported"][name], weight, rtol=rtol, atol=1e-4, msg=name)


@pytest.mark.slow
def test_it_is_torchs_average_and_disturbs_nothing(wanted: dict[str, Any], averaged: dict[str, Any]) -> None:
    assert_follows(averaged, wanted, rtol=1e-6)
    plain = trained(DeepJob(f"{STEPS} --micro-batch-size 8".split()))
    assert averaged["curve"] == plain["curve"], "training continues with the weights"
    assert all(torch.equal(averaged["weights"][name], weight) for name, weight in plain["weights"].items())
    assert abs(plain["evaluations"][-1] - averaged["evaluations"][-1]) > 1e-3


@pytest.mark.slow
def test_the_best_average_is_exported(tmp_path: Path) -> None:
    """The first of two evaluations is best, so the export is the average of that step and not of the last one."""
    flags = f"--micro-batch-size 8 {KEEP_FIRST}"

    class Falling(FallingMetric, DeepJob):
        pass

    found = run(f"{ON} {flags}", tmp_path / "best", Falling)
    assert json.loads((tmp_path / "best" / "summary.json").read_text())["best"]["step"] == 2
    short = run(f"{ON} --micro-batch-size 8 --train-iters 2 --lr-decay-iters 4", tmp_path / "short")
    for name, weight in short["exported"].items():
        assert torch.equal(found["exported"][name], weight)


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_whole_one(averaged: dict[str, Any], tmp_path: Path) -> None:
    _dies(tmp_path / "cut", "--micro-batch-size 8")
    cut = run(f"{ON} --micro-batch-size 8 --resume", tmp_path / "cut")
    assert all(torch.equal(cut["exported"][name], weight) for name, weight in averaged["exported"].items())
    assert cut["evaluations"] == averaged["evaluations"]


@pytest.mark.longer
@pytest.mark.parametrize(
    "how",
    ["--micro-batch-size 8", pytest.param("--micro-batch-size 8 --zero-2-memory-optimization", marks=NEEDS_DEEPSPEED)],
)
def test_an_average_is_not_kept_where_nobody_asks_for_it(how: str, tmp_path: Path) -> None:
    """An average that is requested later starts with the first step from then on."""
    _dies(tmp_path, how)
    for steps, flags in (("3", ""), ("4", ON), ("5", ON)):
        run(f"{how} {flags} --resume --train-iters {steps} --lr-decay-iters 6", tmp_path)
    kept = {step: _kept(tmp_path, step) for step in (2, 3, 4, 5)}
    assert kept[2][1]
    assert not kept[3][1]
    for name, weight in kept[4][0].items():
        assert torch.equal(kept[4][1][name], weight), name
        wanted = torch.lerp(weight, kept[5][0][name], 1 - DECAY)
        torch.testing.assert_close(kept[5][1][name], wanted, msg=name)


def _kept(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights of a checkpoint and their averages as full tensors."""
    reader = Reader(folder / "checkpoints" / f"step-{step}")

    def whole(kind: str, ending: str) -> dict[str, torch.Tensor]:
        shapes = {name: shape for name, shape in reader.names(kind).items() if name.endswith(ending)}
        return {
            name.removesuffix(ending): reader.read(kind, name, (0,) * len(shape), shape)
            for name, shape in shapes.items()
        }

    return whole("weights", ""), whole("optimizer", f"/{AVERAGE}")


def _dies(folder: Path | str, flags: str) -> None:
    job = DeepJob([*f"{STEPS} {ON} {flags} --save-interval 2".split(), "--save", str(folder)])
    job.dies_after = 3
    with pytest.raises(Died):
        job.fit()


def _move(workers: Any, folder: str) -> dict[str, Any]:
    _dies(folder, ENGINES["fsdp"])
    return run(f"{ON} --resume {ENGINES['distributed']}", folder)


@pytest.mark.longer
@pytest.mark.distributed
def test_another_engine_goes_on_with_the_average(wanted: dict[str, Any], tmp_path: Path) -> None:
    for found in run_in_workers(2, _move, str(tmp_path)):
        assert_follows({**found, "curve": wanted["curve"][:2] + found["curve"]}, wanted)
