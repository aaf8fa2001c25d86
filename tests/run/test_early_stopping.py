"""Early stopping: at which step, for what reason, on all workers, and after deaths and resumes."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from rapidformer_templates import Data
from rapidformer_templates.errors import ConfigError, Interrupted
from rapidformer_templates.run.checkpoint.format import candidates
from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import CausalJob
from tests.support.requests import codes
from tests.support.scored import Scored
from tests.support.worker_pool import run_in_workers

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


@pytest.mark.parametrize("patience", [1, 2, 3, 4])
@pytest.mark.parametrize("scores", [RISES, (0.9, *[0.1] * 9), tuple(i / 10 for i in range(10))], ids=str)
def test_a_run_stops_at_the_step_of_transformers(scores: Sequence[float], patience: int) -> None:
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
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [5, 10, 14]
    assert {path.name for path in candidates(tmp_path / "checkpoints")} == {"step-14", "step-10"}
    assert (tmp_path / "export").is_dir()


def test_without_the_flag_nothing_stops() -> None:
    assert run((0.9, *[0.1] * 9), "--no-save")["steps"] == 20


def test_the_last_step_of_all_is_no_early_one() -> None:
    scores = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9, 0.5, 0.5, 0.5)
    summary = run(scores, "--early-stopping-patience", "3", "--no-save")
    assert summary["steps"] == 20
    assert summary["stopped_early"] is None


def test_values_that_are_not_finite_are_not_better() -> None:
    summary = run((math.nan,) * 10, "--early-stopping-patience", "2", "--no-save")
    assert summary["steps"] == 4
    assert summary["stopped_early"] == "after step 4 of 20: 2 evaluations without a finite metric"


@pytest.mark.slow
@pytest.mark.parametrize("dies_after", range(7, 14))
def test_a_killed_run_stops_where_it_would_have(dies_after: int, tmp_path: Path) -> None:
    """There are checkpoints at steps 3, 6, 9 and 12 with the number of evaluations, and those of the best steps."""
    flags = ("--early-stopping-patience", "3", "--save", str(tmp_path), "--save-interval", "3")
    with pytest.raises(InterruptedError):
        run(RISES, *flags, dies_after=dies_after)
    summary = run(RISES, *flags, "--resume")
    assert summary["steps"] == 14
    assert summary["best"]["step"] == 10
    evaluated = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "utility" in line]
    assert evaluated == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.slow
def test_a_complete_run_stays_complete_and_goes_on_with_more_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.slow
def test_a_checkpoint_of_before_the_count_is_taken(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        run(RISES, "--save", str(tmp_path), "--save-interval", "9", dies_after=10)
    newest, *_ = candidates(tmp_path / "checkpoints")
    assert newest.name == "step-9"
    state = json.loads((newest / "state.json").read_text())
    assert state.pop("waited") == 0
    written = json.dumps(state).encode()
    (newest / "state.json").write_bytes(written)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(written), "crc32": zlib.crc32(written)}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    summary = run(RISES, "--save", str(tmp_path), "--early-stopping-patience", "3", "--resume")
    assert summary["steps"] == 14


class WorseAndWorse(CausalJob):
    """A learning rate so high that the validation loss rises."""

    def on_evaluate(self, step: int, metrics: Any) -> None:
        self.evaluated = [*getattr(self, "evaluated", []), metrics["eval_loss"]]


def _in_workers(workers: Any, folder: str) -> dict[str, Any]:
    flags = f"--train-iters 20 --eval-interval 2 --micro-batch-size 4 --lr 3 --save {folder} --no-export-model"
    job = WorseAndWorse([*flags.split(), "--early-stopping-patience", "2", "--fsdp-memory-optimization"])
    summary = job.fit()
    return {"steps": summary["steps"], "evaluated": job.evaluated, "why": summary["stopped_early"]}


@pytest.mark.distributed
def test_all_workers_stop_in_the_same_step(tmp_path: Path) -> None:
    one, other = run_in_workers(2, _in_workers, str(tmp_path))
    assert one == other
    losses = one["evaluated"]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 10
    assert one["steps"] == 2 * len(losses)
    assert one["why"]


@pytest.mark.parametrize(
    "flags",
    ["--epochs 3 --no-keep-best", "--train-iters 30"],
)
def test_what_could_never_stop_is_refused(flags: str) -> None:
    assert codes(f"{flags} --early-stopping-patience 3") == ["RF111"]


def test_without_validation_data_it_is_refused() -> None:
    class Blind(Scored):
        def build_data(self) -> Data:
            return Data(train=super().build_data().train)

    with pytest.raises(ConfigError, match="there is no validation data") as caught:
        Blind(["--lr", "1", "--epochs", "3", "--no-save", "--early-stopping-patience", "2"]).fit()
    assert "--early-stopping-patience" in str(caught.value.where)
