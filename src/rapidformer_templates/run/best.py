"""The best checkpoint of a run: the metric that selects it, and whether higher or lower is better.

If the direction is unknown, the user must specify it, because the wrong one would keep and export the worst
checkpoint. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer_templates.errors import ConfigError, did_you_mean
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_values import named_sets
from rapidformer_templates.planning.metrics import Direction, direction_of, metric_name, metrics_of
from rapidformer_templates.system.terminal import say

if TYPE_CHECKING:
    from rapidformer_templates.run.run import Best, Run

LOSS = "eval_loss"


@dataclass(frozen=True)
class BestMetric:
    """A metric of the evaluation and its better direction."""

    name: str
    direction: Direction

    def improves(self, value: float, best: Best | None) -> bool:
        """Whether a value is better than the best so far. A best of another metric (before a resume) does not count."""
        if best is None or best["metric"] != self.name:
            return True
        return value < best["value"] if self.direction == "min" else value > best["value"]


def check_metric(config: RunConfig, sets: Iterable[str] | None = None, *, of_task: bool = True) -> None:
    """Check that the library's own evaluation computes the metric of ``--metric-for-best``.

    Args:
        sets: names of the validation sets. By default those that the flags name.
        of_task: whether the task's metrics are computed. Otherwise there is only the loss.

    Raises:
        ConfigError: it does not compute this metric.
    """
    name = config.training.metric_for_best
    if sets is None:
        sets = ("", *named_sets(config.data.eval_data_name, "--eval-data-name"))
    names = [metric_name(of, metric) for of in sets for metric in metrics_of(config, of_task=of_task)]
    if name is None or name in names:
        return
    known = f"there are: {', '.join(names)}; your own compute_metrics can return others"
    raise ConfigError(
        f"{config.training.task if of_task else 'this run'} has no metric '{name}'",
        where=f"--metric-for-best ({config.origin('metric_for_best')})",
        hint=did_you_mean(name, names, known),
    )


def best_metric(run: Run) -> BestMetric | None:
    """Return the best metric of a run with loaded data, or None if no best checkpoint is kept.

    Raises:
        ConfigError: a best checkpoint is requested without validation data, or the metric does not exist.
    """
    config, training, sets = run.config, run.config.training, run.data.validation_sets()
    if not training.keeps_best:
        return None
    if not sets:
        requesting = next(
            (flag for flag in ("metric_for_best", "early_stopping_patience", "keep_best") if flag in config.origins),
            None,
        )
        if requesting is None:
            return None
        raise ConfigError(
            "there is no validation data to choose the best checkpoint by",
            where=f"{spelling(requesting)} ({config.origin(requesting)})",
            hint="give a validation part, or leave it out",
        )
    if not run.overrides("compute_metrics"):
        if run.task and run.task.problem:  # the data determined the kind of labels
            config = config.replace("the data", problem_type=run.task.problem)
        check_metric(config, sets, of_task=run.task is not None)
    default = metric_name(next(iter(sets)), run.task.best_metric if run.task else LOSS)
    name = training.metric_for_best or default
    direction = training.metric_for_best_mode or direction_of(name)
    assert direction is not None  # guaranteed by rule RF098, and by a test for the metrics of tasks
    return BestMetric(name, direction)


class BestStep:
    """Remembers the best step of a run in its position, and decides when the run no longer improves.

    Attributes:
        metric: selects the best step.
        patience: evaluations without an improvement before the run stops early. None never stops it early.
    """

    def __init__(self, run: Run, metric: BestMetric, patience: int | None) -> None:
        self.run, self.metric, self.patience = run, metric, patience

    def update(self, metrics: Mapping[str, float]) -> None:
        """Remember the current step if it is the best so far. A lower loss decides between equal values.

        The names of a user's metrics are unknown until the first evaluation. If the metric is not among them, the
        loss replaces it.
        """
        position, sets, metric = self.run.position, self.run.data.validation_sets(), self.metric
        step, best = position.step, position.best
        position.evaluations_since_best += 1
        if metric.name not in metrics:
            names = ", ".join(name for name in metrics if name != LOSS) or "nothing"
            problem = f"compute_metrics returns no '{metric.name}' (it returns {names})"
            if best is not None and best["metric"] == metric.name:
                say(self.run.workers, f"{problem}: step {step} is not a new best", loud=True)
                return
            self.metric = metric = BestMetric(metric_name(next(iter(sets)), LOSS), "min")
            say(self.run.workers, f"{problem}: the best checkpoint is the one with the lowest {metric.name}", loud=True)
        own_set = next((name for name in sets if name and metric.name.startswith(f"{name}/")), "")
        value, loss = metrics[metric.name], metrics.get(metric_name(own_set, LOSS), math.inf)
        if not math.isfinite(value):
            say(self.run.workers, f"the {metric.name} of step {step} is {value}: not a new best", loud=True)
            return
        is_better = metric.improves(value, best)
        if is_better:
            position.evaluations_since_best = 0
        best_loss = position.best_loss
        if is_better or (best and best["value"] == value and best_loss is not None and loss < best_loss):
            position.best = {"step": step, "metric": metric.name, "value": value}
            position.best_loss = loss if math.isfinite(loss) else None

    @property
    def patience_reason(self) -> str | None:
        """Why the run should stop, if patience has run out. All workers decide the same."""
        evaluations, best = self.run.position.evaluations_since_best, self.run.position.best
        if self.patience is None or evaluations < self.patience:
            return None
        than = (
            f"a better {best['metric']} than {best['value']:.6g} (the best step is {best['step']})"
            if best
            else "a finite metric"
        )
        return f"{evaluations} evaluations without {than}"
