"""The best evaluation always has a checkpoint. Runs that stop early or by ``stop()``: when, why, and on all workers."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from rapidformer_templates import Callback, Data
from rapidformer_templates.errors import ConfigError, Interrupted
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.format import candidates
from rapidformer_templates.run.folder import read_metrics
from tests.support.lines import FLAGS as LINE
from tests.support.lines import Died, Worsening
from tests.support.messages import Says
from tests.support.requests import codes
from tests.support.scored import Scored
from tests.support.worker_pool import run_in_workers

BEST = f"{' '.join(LINE)} --epochs 6 --keep-best --keep-checkpoints 1 --eval-interval 3 --save-interval 30".split()


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
    summary = Worsening([*LINE, "--epochs", "1", "--no-save"]).fit()
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
def test_the_best_average_is_not_the_best_of_a_run_without_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--ema-decay", "0.5")
    step, _ = best_of(tmp_path)
    summary = train(tmp_path, "--resume")
    assert f"step {step} is the best one with averages of the weights (--ema-decay)" in capsys.readouterr().err
    assert summary["best"] is None
    assert torch.equal(exported(tmp_path), saved(tmp_path, 30))


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


EVERY = 2
FLAGS = f"--lr 0.1 --global-batch-size 4 --train-iters 20 --eval-interval {EVERY} --metric-for-best utility"
FLAGS += " --metric-for-best-mode max --log-interval 5"
RISES = (0.1, 0.5, 0.4, 0.6, 0.6, 0.5, 0.4, 0.9, 0.9, 0.9)
"""Before a patience of 3 ends, step 8 has the highest value. Step 10 has the same one with a lower loss, so it is the
best step. The highest value of all comes too late."""


def run(scores: Sequence[float], *flags: str, dies_after: int | None = None, **job_values: Any) -> dict[str, Any]:
    job = Scored([*FLAGS.split(), *flags])
    job.scores, job.dies_after = scores, dies_after
    vars(job).update(job_values)
    return job.fit()


def stops_of_transformers(scores: Sequence[float], patience: int) -> int:
    """Return the evaluation (from 1) after which transformers' callback stops, with the Trainer's rule for the best."""
    callback, state, control = EarlyStoppingCallback(patience), TrainerState(), TrainerControl()
    arguments = TrainingArguments(metric_for_best_model="utility", greater_is_better=True, use_cpu=True, report_to=[])
    for number, score in enumerate(scores, 1):
        callback.on_evaluate(arguments, state, control, {"eval_utility": score})
        if control.should_training_stop:
            return number
        if state.best_metric is None or score > state.best_metric:
            state.best_metric = score
    return len(scores)


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize(
    "scores", [RISES, (0.9, *[0.1] * 9), (*(i / 10 for i in range(6)), 0.9, 0.5, 0.5, 0.5)], ids=str
)
def test_a_run_stops_at_the_step_of_transformers(scores: Sequence[float], patience: int) -> None:
    """The last run with a patience of 3 would stop in its last step. It is complete then."""
    summary = run(scores, "--early-stopping-patience", str(patience), "--no-save")
    assert summary["steps"] == stops_of_transformers(scores, patience) * EVERY
    assert (summary["stopped_early"] is None) == (summary["steps"] == 20)


@pytest.mark.slow
def test_it_ends_as_a_finished_run_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(RISES, "--early-stopping-patience", "3", "--save", str(tmp_path))
    why = "after step 14 of 20: 3 evaluations without a better utility than 0.6 (the best step is 10)"
    assert f"stopped early {why}\n" in capsys.readouterr().err
    assert summary == json.loads((tmp_path / "summary.json").read_text()) | {"metrics": summary["metrics"]}
    assert (summary["steps"], summary["stopped_early"], summary["best"]["step"]) == (14, why, 10)
    assert {path.name for path in candidates(tmp_path / "checkpoints")} == {"step-14", "step-10"}


def test_values_that_are_not_finite_are_not_better() -> None:
    summary = run((math.nan,) * 10, "--early-stopping-patience", "2", "--no-save")
    assert summary["steps"] == 4
    assert summary["stopped_early"] == "after step 4 of 20: 2 evaluations without a finite metric"


@pytest.mark.slow
@pytest.mark.parametrize("dies_after", [8, 11, 13])
def test_a_killed_run_stops_where_it_would_have(dies_after: int, tmp_path: Path) -> None:
    """There are checkpoints at steps 3, 6, 9 and 12 with the number of evaluations, and those of the best steps."""
    flags = ("--early-stopping-patience", "3", "--save", str(tmp_path), "--save-interval", "3")
    with pytest.raises(InterruptedError):
        run(RISES, *flags, dies_after=dies_after)
    summary = run(RISES, *flags, "--resume")
    assert (summary["steps"], summary["best"]["step"]) == (14, 10)
    evaluated = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "utility" in line]
    assert evaluated == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.slow
def test_a_complete_run_goes_on_with_more_patience(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--save", str(tmp_path), "--early-stopping-patience")
    first = run(RISES, *flags, "3")
    again = run(RISES, *flags, "3", "--resume")
    assert (
        "nothing is left to train: 14 of 14 steps are done (stopped early after step 14 of 20"
        in capsys.readouterr().err
    )
    assert (again["steps"], again["stopped_early"]) == (14, first["stopped_early"])
    more = run(RISES, *flags, "4", "--resume")
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "utility" in line}
    assert (more["steps"], more["best"]["step"]) == (20, min((16, 18, 20), key=lambda step: losses[step]))


@pytest.mark.slow
def test_a_request_to_end_is_heard_before(tmp_path: Path) -> None:
    """A stop in the step that would be the last one anyway is not an interruption. An earlier stop is."""
    flags = ("--early-stopping-patience", "3", "--save", str(tmp_path))
    with pytest.raises(Interrupted):
        run(RISES, *flags, asks_after=11)
    assert run(RISES, *flags, "--resume")["steps"] == 14


def test_what_could_never_stop_is_refused(says: Says) -> None:
    for flags in ("--epochs 3 --no-keep-best", "--train-iters 30"):
        assert codes(f"{flags} --early-stopping-patience 3") == ["RF111"]
    blind = type("Blind", (Scored,), {"build_data": lambda self: Data(train=Scored.build_data(self).train)})
    with says(ConfigError):
        blind(["--lr", "1", "--epochs", "3", "--no-save", "--early-stopping-patience", "2"]).fit()


REASON = "the loss is low enough"


class Stops(Callback):
    """Stops a run in one event at one step, on the ranks that are given."""

    def __init__(self, event: str, step: int = 0, ranks: tuple[int, ...] = (0,)) -> None:
        self.event, self.step, self.ranks = event, step, ranks
        self.is_main: bool | None = None
        self.steps_seen: list[int] = []

    def _react(self, trainer: Any, event: str, step: int = 0) -> None:
        self.is_main = trainer.is_main
        rank = trainer.engine.workers.rank
        if (event, step) == (self.event, self.step) and rank in self.ranks:
            trainer.stop(f"{REASON} on {rank}")

    def on_train_start(self, trainer: Any) -> None:
        self._react(trainer, "start")

    def on_step_end(self, trainer: Any, step: int, result: Any) -> None:
        self.steps_seen.append(step)
        self._react(trainer, "step", step)

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self._react(trainer, "epoch", epoch)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self._react(trainer, "evaluation", step)


def stopping(callback: Stops | None, *flags: str) -> Scored:
    job = Scored(
        ["--lr", "0.1", "--eval-interval", "4", "--log-interval", "4", *flags], callbacks=[callback] if callback else []
    )
    job.scores, job.every = [0.5] * 40, 1
    return job


def test_a_stop_ends_as_a_complete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = Stops("step", 6)
    summary = stopping(callback, "--train-iters", "20", "--save", str(tmp_path)).fit()
    why = f"after step 6 of 20: {REASON} on 0"
    assert (summary["steps"], summary["stopped_early"], callback.steps_seen) == (6, why, [1, 2, 3, 4, 5, 6])
    assert f"stopped early {why}\n" in capsys.readouterr().err
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [4, 6]
    assert [line["step"] for line in lines if "utility" in line] == [4, 6]
    assert next(path.name for path in candidates(tmp_path / "checkpoints")) == "step-6"
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_early"] == why
    assert (tmp_path / "export").is_dir()


def test_a_best_step_that_was_saved_before_its_evaluation_is_known_in_the_checkpoint(tmp_path: Path) -> None:
    flags = [*LINE, "--keep-best", "--eval-interval", "2", "--save-interval", "3", "--save", str(tmp_path)]
    Worsening([*flags, "--train-iters", "12"], callbacks=[Stops("step", 3)]).fit()
    assert best_of(tmp_path)[0] == 3
    state = json.loads((tmp_path / "checkpoints" / "step-3" / "state.json").read_text())
    assert (state["best"]["step"], state["best"]["value"]) == best_of(tmp_path)


def test_the_weights_are_those_of_the_step(tmp_path: Path) -> None:
    """They equal those of a run that was planned to be that short."""
    summaries, weights = [], []
    for name, steps, callback in (("early", "20", Stops("step", 6)), ("short", "6", Stops("never"))):
        flags = ["--train-iters", steps, "--lr-decay-style", "constant", "--save", str(tmp_path / name)]
        job = stopping(callback, *flags)
        summaries.append(job.fit())
        weights.append(torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()]))
    assert torch.equal(*weights)
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


@pytest.mark.parametrize(
    ("event", "at", "steps"),
    [("start", 0, 0), ("step", 1, 1), ("evaluation", 4, 4), ("epoch", 1, 20), ("step", 40, 40), ("never", 0, 40)],
)
def test_every_event_may_stop(event: str, at: int, steps: int, tmp_path: Path) -> None:
    summary = stopping(Stops(event, at), "--epochs", "2", "--micro-batch-size", "4", "--save", str(tmp_path)).fit()
    assert summary["steps"] == steps
    assert (summary["stopped_early"] is None) == (steps == 40)
    assert (tmp_path / "export").is_dir()


def test_a_resumed_run_continues_and_the_next_fit_does_not_stop(tmp_path: Path) -> None:
    saved = ["--train-iters", "12", "--save", str(tmp_path)]
    assert stopping(Stops("step", 6), *saved).fit()["steps"] == 6
    summary = stopping(None, *saved, "--resume").fit()
    assert (summary["steps"], summary["stopped_early"]) == (12, None)
    callback = Stops("step", 6)
    other = stopping(callback, "--train-iters", "12", "--no-save")
    assert other.fit()["steps"] == 6
    callback.step = 0
    assert other.fit()["steps"] == 12


def _stop_by(workers: Any, folder: str, ranks: tuple[int, ...]) -> tuple[dict[str, Any], list[int], bool | None]:
    callback = Stops("step", 6, ranks)
    flags = ["--train-iters", "20", "--micro-batch-size", "2", "--save", folder]
    summary = stopping(callback, *flags).fit()
    return summary, callback.steps_seen, callback.is_main


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=str)
def test_all_workers_end_at_the_same_step(ranks: tuple[int, ...], tmp_path: Path) -> None:
    results = run_in_workers(2, _stop_by, str(tmp_path), ranks)
    for summary, steps, _ in results:
        assert steps == [1, 2, 3, 4, 5, 6]
        assert (summary["steps"], summary["stopped_early"]) == (6, f"after step 6 of 20: {REASON} on {min(ranks)}")
    assert [is_main for _, _, is_main in results] == [True, False]
    assert next(path.name for path in candidates(tmp_path / "checkpoints")) == "step-6"
