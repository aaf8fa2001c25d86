"""The best evaluation always has a checkpoint, which is saved immediately, in the folder of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rapidformer_templates import Data
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import read_metrics
from tests.support.lines import FLAGS, Died, Worsening

BEST = f"{' '.join(FLAGS)} --epochs 6 --keep-best --keep-checkpoints 1 --eval-interval 3 --save-interval 30".split()


def train(folder: Path, *flags: str, dies_after: int | None = None) -> dict[str, Any]:
    job = Worsening([*BEST, "--save", str(folder), *flags])
    job.dies_after = dies_after
    return job.fit()


def best_of(folder: Path) -> tuple[int, float]:
    """Return (step, loss) of the lowest evaluation of a run."""
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(folder / "metrics.jsonl") if "eval_loss" in line}
    step = min(losses, key=lambda s: losses[s])
    return step, losses[step]


def exported(folder: Path) -> torch.Tensor:
    return load_file(folder / "export" / "model.safetensors")["weight"]


def saved(folder: Path, step: int) -> torch.Tensor:
    return checkpoint.Reader(folder / "checkpoints" / f"step-{step}").read("weights", "weight", (0, 0), (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["waiting", "async"])
def test_a_best_step_between_two_saves_is_saved_and_exported(flags: list[str], tmp_path: Path) -> None:
    summary = train(tmp_path, *flags)
    step, loss = best_of(tmp_path)
    assert step < 30, "nothing but a best step is saved before the end"
    assert summary["best"] == {"step": step, "metric": "eval_loss", "value": loss}
    assert summary["metrics"]["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert torch.equal(exported(tmp_path), saved(tmp_path, step))
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"latest", f"step-{step}", "step-30"}


class Tied(Worsening):
    """Its accuracy is the same in every evaluation, or in every one of the first set."""

    sets: tuple[str, ...] = ()

    def build_data(self) -> Data:
        data = super().build_data()
        if self.sets:
            data.valid = dict.fromkeys(self.sets, data.valid)
        return data

    def compute_metrics(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": 0.5}


@pytest.mark.parametrize("sets", [(), ("near", "far")], ids=str)
def test_the_loss_decides_among_equals(
    sets: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric, loss = ("near/accuracy", "near/loss") if sets else ("accuracy", "eval_loss")
    job = Tied([*BEST, "--save", str(tmp_path), "--metric-for-best", metric])
    job.sets = sets
    summary = job.fit()
    losses = {line["step"]: line[loss] for line in read_metrics(tmp_path / "metrics.jsonl") if loss in line}
    step = min(losses, key=lambda s: losses[s])
    assert 3 < step < 30, "neither the first evaluation nor the last one"
    assert summary["best"] == {"step": step, "metric": metric, "value": 0.5}
    assert torch.equal(exported(tmp_path), saved(tmp_path, step))
    assert summary["metrics_step"] == step
    assert f"step {step}, the best by {metric}" in capsys.readouterr().out


def test_a_resumed_run_compares_with_the_loss_before(tmp_path: Path) -> None:
    flags = [*BEST, "--save", str(tmp_path), "--metric-for-best", "accuracy"]
    job = Tied(flags)
    job.dies_after = 5  # its only checkpoint is the best one so far, of step 3
    with pytest.raises(Died):
        job.fit()
    best = Tied([*flags, "--resume"]).fit()["best"]
    assert best["step"] == best_of(tmp_path)[0] > 3


def test_the_results_without_a_best_step_are_of_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Worsening([*FLAGS, "--epochs", "1", "--no-save"]).fit()
    assert summary["metrics_step"] == summary["steps"] == 5
    assert "step 5, the last one" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_has_its_own_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Died):
        train(tmp_path / "first", dies_after=16)
    step, loss = best_of(tmp_path / "first")
    capsys.readouterr()
    summary = train(tmp_path / "second", "--load", str(tmp_path / "first"))
    said = capsys.readouterr().err
    assert f"the best evaluation so far (step {step}, eval_loss {loss:.6g}) belongs to {tmp_path / 'first'}" in said
    own, own_loss = best_of(tmp_path / "second")
    assert summary["best"] == {"step": own, "metric": "eval_loss", "value": own_loss}
    assert torch.equal(exported(tmp_path / "second"), saved(tmp_path / "second", own))


@pytest.mark.slow
def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of an earlier version may have one, and a user may have cleaned up the folder."""
    train(tmp_path)
    step, _ = best_of(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{step}")
    capsys.readouterr()
    summary = train(tmp_path, "--resume")
    assert f"warning: the best checkpoint is lost (step-{step}: manifest.json cannot be read" in capsys.readouterr().err
    assert summary["best"] is None
    assert torch.equal(exported(tmp_path), saved(tmp_path, 30))
    assert json.loads((tmp_path / "summary.json").read_text())["best"] is None


@pytest.mark.slow
def test_a_damaged_best_checkpoint_costs_no_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Harmed(Worsening):
        def on_checkpoint(self, step: int, folder: Path) -> None:
            if step == 30:
                best = folder.with_name(f"step-{best_of(tmp_path)[0]}") / "weights-00000-00000.safetensors"
                content = bytearray(best.read_bytes())
                content[-1] ^= 1
                best.write_bytes(content)

    summary = Harmed([*BEST, "--save", str(tmp_path)]).fit()
    assert "weights-00000-00000.safetensors is damaged" in capsys.readouterr().err
    assert summary["best"] is None
    assert torch.equal(exported(tmp_path), saved(tmp_path, 30))
