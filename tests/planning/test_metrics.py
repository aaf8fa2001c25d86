"""The best checkpoint: the metric's direction, what is checked before training, and what only a run can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rapidformer_templates import Data, Finetuner, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, RapidformerError, Refused
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.tasks import METRICS_OF_PROBLEM, TASKS, direction_of

FLAGS = ["--lr", "0.1", "--micro-batch-size", "5", "--train-iters", "4", "--eval-interval", "1", "--keep-best"]


class Scored(Trainer):
    """Fits y = 2x + 1. Evaluation number ``i`` returns ``scores[i]``."""

    metric = "wer"
    scores: tuple[float, ...] = (0.4, 0.1, 0.3, 0.9)

    def build_data(self) -> Data:
        self.evaluations = 0
        x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
        samples = [{"x": row, "y": 2 * row + 1} for row in x]
        return Data(train=samples, valid=samples[:5])

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def read_outputs(self, outputs: Any, batch: Any) -> tuple[list[Any], list[Any]]:
        return [0] * len(batch["x"]), [0] * len(batch["x"])

    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        self.evaluations += 1
        return {self.metric: self.scores[min(self.evaluations, len(self.scores)) - 1]}


def best_of(folder: Path, *flags: str, **attributes: Any) -> dict[str, Any] | None:
    """Return the best step from the summary. Each step has a checkpoint."""
    job = Scored([*FLAGS, "--save", str(folder), "--save-interval", "1", *flags])
    for name, value in attributes.items():
        setattr(job, name, value)
    best: dict[str, Any] | None = job.fit()["best"]
    return best


def test_an_error_rate_is_best_where_it_is_least(tmp_path: Path) -> None:
    assert best_of(tmp_path / "run", "--metric-for-best", "wer") == {"step": 2, "metric": "wer", "value": 0.1}


@pytest.mark.slow
def test_a_metric_of_ones_own_has_the_direction_that_is_asked_for(tmp_path: Path) -> None:
    own = ("--metric-for-best", "quux")
    least = best_of(tmp_path / "min", *own, "--metric-for-best-mode", "min", metric="quux")
    most = best_of(tmp_path / "max", *own, "--metric-for-best-mode", "max", metric="quux")
    assert (least or {})["step"] == 2
    assert (most or {})["step"] == 4


def test_a_metric_is_asked_for_in_pretraining_too(tmp_path: Path) -> None:
    """If no best checkpoint is kept by default, naming a metric enables it."""
    flags = [flag for flag in FLAGS if flag != "--keep-best"]
    job = Scored([*flags, "--save", str(tmp_path), "--save-interval", "1", "--metric-for-best", "wer"])
    assert job.fit()["best"]["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("scores", [(math.nan, 0.2, 0.1, math.nan), (0.1, math.nan, 0.05, math.nan)])
def test_nan_is_no_best(scores: tuple[float, ...], tmp_path: Path) -> None:
    best = best_of(tmp_path / "run", "--metric-for-best", "wer", scores=scores)
    assert (best or {})["step"] == 3


@pytest.mark.slow
def test_nothing_is_best_where_all_are_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert best_of(tmp_path / "run", "--metric-for-best", "wer", scores=(math.nan,) * 4) is None
    assert "the wer of step 1 is nan: not a new best" in capsys.readouterr().err


def test_an_unknown_direction_is_asked_about_before_training(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        Scored([*FLAGS, "--save", str(tmp_path / "run"), "--metric-for-best", "quux"]).fit()
    (found,) = caught.value.diagnostics
    assert found.rule == "RF098"
    assert [works.change for works in found.works][:2] == [
        "--metric-for-best-mode max",
        "--metric-for-best-mode min",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--metric-for-best", "wer", "--no-keep-best"],
            "--metric-for-best has no effect if no best checkpoint is kept",
        ),
        (["--metric-for-best-mode", "min"], "--metric-for-best-mode has no effect without --metric-for-best"),
    ],
)
def test_a_flag_of_the_best_that_would_do_nothing_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        Scored([*FLAGS, "--no-save", *flags]).fit()


def test_a_best_checkpoint_needs_something_to_evaluate_on(tmp_path: Path) -> None:
    class Unvalidated(Scored):
        def build_data(self) -> Data:
            data = super().build_data()
            data.valid = None
            return data

    with pytest.raises(ConfigError, match="there is no validation data to choose the best checkpoint by") as caught:
        Unvalidated([*FLAGS, "--save", str(tmp_path / "run")]).fit()
    assert caught.value.where == "--keep-best (command line)"


def test_a_misspelt_metric_of_a_task_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n", encoding="utf-8")
    flags = ["--task", "sequence_classification", "--data-dir", str(tmp_path), "--model-type", "bert", "--lr", "1e-3"]
    flags += ["--epochs", "1", "--save", str(tmp_path / "run"), "--metric-for-best-mode", "max"]
    with pytest.raises(ConfigError) as caught:
        Finetuner([*flags, "--metric-for-best", "acuracy"]).fit()
    assert caught.value.render() == (
        "error: sequence_classification has no metric 'acuracy'\n"
        "  where  --metric-for-best (command line)\n"
        "  help   did you mean accuracy? there are: eval_loss, accuracy, f1, matthews, f1_macro, exact_match, "
        "mse, mae, pearson; your own compute_metrics can return others"
    )


@pytest.mark.parametrize(
    ("task", "name", "told"),
    [
        ("causal_lm", "accuracy", "did you mean token_accuracy? there are: eval_loss, perplexity, token_accuracy"),
        ("sequence_classification", "acuracy", "did you mean accuracy? there are: eval_loss, accuracy, f1, matthews"),
    ],
)
def test_plan_tells_of_a_misspelt_metric(task: str, name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--task", task, "--metric-for-best", name]) == 2
    assert told in capsys.readouterr().err


def test_a_near_name_of_the_task_is_the_first_way_out() -> None:
    flags = ["--task", "sequence_classification", "--metric-for-best", "acuracy", "--lr", "1", "--epochs", "1"]
    flags += ["--no-save"]
    own = type("Own", (Finetuner,), {"compute_metrics": lambda self, predictions, references: {}})
    with pytest.raises(Refused) as caught:
        own(flags).fit()
    assert caught.value.diagnostics[0].works[0].change == "--metric-for-best accuracy"


class OwnMetrics(Scored):
    """A fine-tuning task with the user's own metrics, which do not include the task's default metric."""

    uses_task = True

    def build_data(self) -> Data:
        self.task.notes = []
        return super().build_data()

    def count_targets(self, batch: Any) -> float:
        return float(len(batch["x"]))


@pytest.mark.slow
def test_the_loss_stands_for_a_metric_that_the_users_own_function_does_not_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, "--task", "sequence_classification", "--model-type", "bert", "--save", str(tmp_path / "run")]
    summary = OwnMetrics([*flags, "--save-interval", "1"]).fit()
    assert summary["steps"] == 4
    assert summary["best"]["metric"] == "eval_loss"
    told = capsys.readouterr().err
    assert told.count("compute_metrics returns no 'accuracy' (it returns wer)") == 1
    again = OwnMetrics([*flags, "--save-interval", "1", "--resume", "--train-iters", "6"])
    again.scores = (0.5, 0.5)
    assert again.fit()["best"]["metric"] == "eval_loss"


@pytest.mark.slow
def test_another_metric_at_a_resume_begins_anew(tmp_path: Path) -> None:
    assert (best_of(tmp_path, "--metric-for-best", "wer") or {})["step"] == 2
    job = Scored([*FLAGS, "--save", str(tmp_path), "--resume", "--train-iters", "6", "--metric-for-best", "f1"])
    job.metric, job.scores = "f1", (0.01, 0.02)
    assert job.fit()["best"] == {"step": 6, "metric": "f1", "value": 0.02}


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("eval_loss", "min"), ("perplexity", "min"), ("wer", "min"), ("eval_wer", "min"), ("cer", "min"),
        ("mse", "min"), ("val_rmse", "min"), ("mean_absolute_error", "min"), ("bits_per_byte", "min"),
        ("word_error_rate", "min"), ("accuracy", "max"), ("top_5_accuracy", "max"), ("macro_f1", "max"),
        ("f1_macro", "max"), ("bleu", "max"), ("rougeL", "max"), ("roc_auc", "max"), ("matthews", "max"),
        ("pearson", "max"), ("F1", "max"), ("log_likelihood", "max"), ("negative_log_likelihood", "min"),
        ("neg_mean_squared_error", None), ("negative_mse", None), ("accuracy_drop", None), ("quux", None),
        ("score", None), ("", None),
    ],
)  # fmt: skip
def test_directions_of_usual_names(name: str, direction: str | None) -> None:
    assert direction_of(name) == direction


@pytest.mark.parametrize("task", TASKS)
def test_every_metric_of_a_task_has_a_direction(task: str) -> None:
    assert all(direction_of(name) for name in TASKS[task].metrics)
    best = load_object(TASKS[task].implementation).best_metric
    assert best == "eval_loss" or best in TASKS[task].metrics


def test_metrics_of_the_tasks_are_those_that_they_compute() -> None:
    """The names come from a table, so no plan has to import sklearn for them."""
    made: dict[str, Any] = {
        "sequence_classification": ([0, 1], [0, 1]),
        "token_classification": ([["O", "B-X"]], [["O", "B-X"]]),
        "masked_lm": ([np.array([1])], [np.array([1])]),
        "causal_lm": ([np.array([1])], [np.array([1])]),
        "pretraining": ([np.array([1])], [np.array([1])]),
        "seq2seq_lm": (["a"], ["a"]),
        "question_answering": ([], []),
        "preference": ([(1.0, 0.0)], [None]),
        "reward": ([(1.0, 0.0)], [None]),
    }
    for task, (predictions, references) in made.items():
        kind = load_object(TASKS[task].implementation)
        blank = kind.__new__(kind)
        blank.features, blank.examples, blank.may_be_null = [], [], False
        assert tuple(blank.compute_metrics(predictions, references)) == TASKS[task].metrics
    of_problems: dict[str, Any] = {
        "regression": ([0.5, 1.0], [0.0, 1.0]),
        "multi_label_classification": ([[0, 1]], [[0, 1]]),
    }
    for problem, (predictions, references) in of_problems.items():
        kind = load_object(TASKS["sequence_classification"].implementation)
        blank = kind.__new__(kind)
        blank.problem = problem
        assert tuple(blank.compute_metrics(predictions, references)) == METRICS_OF_PROBLEM[problem]
        assert all(direction_of(name) for name in METRICS_OF_PROBLEM[problem])


def test_a_run_of_its_own_data_has_no_metric_but_its_loss(tmp_path: Path) -> None:
    class Plain(Scored):
        compute_metrics = Trainer.compute_metrics  # type: ignore[assignment]

    with pytest.raises(RapidformerError, match="this run has no metric 'wer'"):
        Plain([*FLAGS, "--save", str(tmp_path / "run"), "--metric-for-best", "wer"]).fit()
