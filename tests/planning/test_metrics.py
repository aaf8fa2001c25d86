"""The best checkpoint: the metric's direction, what is checked before training, and what only a run can show."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates import Data, Finetuner, Trainer
from rapidformer_templates.errors import ConfigError, RapidformerError, Refused
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.tasks import METRICS_OF_PROBLEM, TASKS, direction_of
from tests.support import scored
from tests.support.messages import Says

FLAGS = ["--lr", "0.1", "--micro-batch-size", "5", "--train-iters", "4", "--eval-interval", "1", "--keep-best"]


class Scored(scored.Scored):
    """Evaluates after each step. ``metric`` is the name of the scores."""

    every = 1
    metric = "wer"
    scores: Sequence[float] = (0.4, 0.1, 0.3, 0.9)

    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        return {self.metric: super().compute_metrics(predictions, references)["utility"]}


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


@pytest.mark.parametrize(
    "flags",
    [
        "--metric-for-best quux --save run",
        "--metric-for-best wer --no-keep-best --no-save",
        "--metric-for-best-mode min --no-save",
    ],
)
def test_a_flag_of_the_best_that_cannot_act_is_refused_before_training(flags: str, says: Says) -> None:
    with says(Refused):
        Scored([*FLAGS, *flags.split()]).fit()


def test_a_best_checkpoint_needs_something_to_evaluate_on(tmp_path: Path, says: Says) -> None:
    class Unvalidated(Scored):
        def build_data(self) -> Data:
            data = super().build_data()
            data.valid = None
            return data

    class Plain(Scored):
        compute_metrics = Trainer.compute_metrics  # type: ignore[assignment]

    with says(ConfigError):
        Unvalidated([*FLAGS, "--save", str(tmp_path / "run")]).fit()
    with says(RapidformerError):
        Plain([*FLAGS, "--save", str(tmp_path / "run"), "--metric-for-best", "wer"]).fit()


def test_a_misspelt_metric_of_a_task_is_refused_before_anything_is_built(tmp_path: Path, says: Says) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n", encoding="utf-8")
    flags = f"--task sequence_classification --data-dir {tmp_path} --model-type bert --lr 1e-3 --epochs 1"
    flags += f" --save {tmp_path / 'run'} --metric-for-best-mode max --metric-for-best acuracy"
    with says(ConfigError):
        Finetuner(flags.split()).fit()
    says.command("plan --task causal_lm --metric-for-best accuracy")


def test_a_near_name_of_the_task_is_the_first_way_out(says: Says) -> None:
    flags = "--task sequence_classification --metric-for-best acuracy --lr 1 --epochs 1 --no-save"
    own = type("Own", (Finetuner,), {"compute_metrics": lambda self, predictions, references: {}})
    with says(Refused):
        own(flags.split()).fit()


class OwnMetrics(Scored):
    """A fine-tuning task with the user's own metrics, which do not include the task's default metric."""

    uses_task = True

    def build_data(self) -> Data:
        self.task.notes = []
        return super().build_data()

    def count_targets(self, batch: Any) -> float:
        return float(len(batch["x"]))

    def read_outputs(self, outputs: Any, batch: Any) -> tuple[list[Any], list[Any]]:
        return [0] * len(batch["x"]), [0] * len(batch["x"])


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
    again.scores = (0.5,) * 6
    assert again.fit()["best"]["metric"] == "eval_loss"


@pytest.mark.slow
def test_another_metric_at_a_resume_begins_anew(tmp_path: Path) -> None:
    assert (best_of(tmp_path, "--metric-for-best", "wer") or {})["step"] == 2
    job = Scored([*FLAGS, "--save", str(tmp_path), "--resume", "--train-iters", "6", "--metric-for-best", "f1"])
    job.metric, job.scores = "f1", (0.0, 0.0, 0.0, 0.0, 0.01, 0.02)
    assert job.fit()["best"] == {"step": 6, "metric": "f1", "value": 0.02}


DIRECTIONS = {
    "min": "eval_loss perplexity wer eval_wer cer mse val_rmse mean_absolute_error bits_per_byte word_error_rate "
    "negative_log_likelihood",
    "max": "accuracy top_5_accuracy macro_f1 f1_macro bleu rougeL roc_auc matthews pearson F1 log_likelihood",
    None: "neg_mean_squared_error negative_mse accuracy_drop quux score",
}


def test_directions_of_usual_names() -> None:
    for direction, names in DIRECTIONS.items():
        assert {name: direction_of(name) for name in names.split()} == dict.fromkeys(names.split(), direction)
    assert direction_of("") is None


@pytest.mark.parametrize("task", TASKS)
def test_every_metric_of_a_task_has_a_direction(task: str) -> None:
    assert all(direction_of(name) for name in TASKS[task].metrics)
    best = load_object(TASKS[task].implementation).best_metric
    assert best == "eval_loss" or best in TASKS[task].metrics


def test_metrics_of_the_tasks_are_those_that_they_compute() -> None:
    """The names come from a table, so no plan has to import sklearn for them."""
    made: dict[str, Any] = {
        "sequence_classification": ([0, 1], [0, 1]), "token_classification": ([["O", "B-X"]], [["O", "B-X"]]),
        "masked_lm": ([np.array([1])], [np.array([1])]), "causal_lm": ([np.array([1])], [np.array([1])]),
        "pretraining": ([np.array([1])], [np.array([1])]), "seq2seq_lm": (["a"], ["a"]), "question_answering": ([], []),
        "preference": ([(1.0, 0.0)], [None]), "reward": ([(1.0, 0.0)], [None]),
    }  # fmt: skip
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
