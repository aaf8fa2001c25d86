"""The steps of a run: the order of their samples, their number, what is due after a step, and which step is the best.

If it is unknown whether a higher or a lower metric is better, the user must specify it, because the wrong direction
would keep and export the worst checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from rapidformer_templates.data.loader import sample_lengths
from rapidformer_templates.data.order import Order, SampleOrder, keep_apart
from rapidformer_templates.data.streaming import StreamOrder
from rapidformer_templates.data.types import Endless, SampleSet
from rapidformer_templates.errors import ConfigError, counted
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_values import Epochs, Interval
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.tasks import Direction, direction_of, metric_name
from rapidformer_templates.run.early_checks import check_metric
from rapidformer_templates.run.run import Run
from rapidformer_templates.system.terminal import say


def build_order(run: Run, samples: SampleSet | Endless) -> Order:
    """Return the order of the training samples.

    Raises:
        ConfigError: a flag requests an order, but the samples have a fixed one.
        DataError: the samples cannot be batched by length.
    """
    training, group = run.config.training, run.config.data.group_by_length
    ordering = next((switch for name in run.plan.switches if (switch := REGISTRY[name]).order), None)
    in_order = getattr(samples, "in_order", False)
    if (group or ordering) and in_order:
        flag = next(iter(ordering.on)) if ordering else "group_by_length"
        message = "these samples have their own order"
        raise ConfigError(message, where=f"{spelling(flag)} ({run.config.origin(flag)})", hint="leave it out")
    if ordering and ordering.order:
        order, line = load_object(ordering.order)(run, samples)
        say(run.workers, line)
        return order
    keep_apart(samples, run.plan.sizes.global_batch)
    if isinstance(samples, Endless):
        return StreamOrder(samples, run.plan.sizes.global_batch, training.seed)
    count, batch = len(samples), run.plan.sizes.global_batch
    if count < batch and training.epochs is None:
        say(run.workers, f"note       there are {count:,} samples for a global batch of {batch:,}: a step repeats some")
    if group is None:
        group = training.fine_tunes and not run.config.data.pack_sequences  # packed rows all have the same length
    return SampleOrder(
        count,
        batch,
        training.seed,
        by_epochs=training.epochs is not None,
        lengths=sample_lengths(samples, run.data, training=True) if group and not in_order else None,
        in_order=in_order,
        identity=getattr(samples, "identity", None),
    )


def count_steps(run: Run) -> int:
    """Return the optimizer steps of the run. A length in epochs is counted here, because it needs the data.

    Raises:
        ConfigError: a flag is in epochs, but the samples are a stream.
    """
    training, per_epoch = run.config.training, run.order.steps_per_epoch
    if training.in_epochs and not per_epoch:
        name = training.in_epochs[0]
        message = "the training samples are a stream without a length, so an epoch has no number of steps"
        hint = f"give {'--train-iters' if name == 'epochs' else 'it'} as a number of steps"
        raise ConfigError(message, where=f"{spelling(name)} ({run.config.origin(name)})", hint=hint)
    if isinstance(training.train_iters, Epochs):
        steps = training.train_iters.steps(per_epoch)
        line = f"note       --train-iters {training.train_iters}: {counted(steps, 'step')}, {per_epoch:,} per epoch"
        say(run.workers, line)
        return steps
    return training.train_iters or per_epoch * (training.epochs or 1)


EVALUATE, SAVE = "evaluate", "save"
DUE_BITS = {EVALUATE: 1, SAVE: 2}
PRINTED_LINES, CURVE_POINTS, MAX_LOG_INTERVAL = 20, 100, 100
now = time.monotonic


@dataclass
class Intervals:
    """Decides what is due after a step. Everything is due after the last one.

    The run counts steps, samples and tokens, so that a resumed run acts at the same points. Epochs are counted in
    steps. Minutes are measured by the main worker, since its start or since the last time. The other workers receive
    its decision in the exchange before a step.

    Attributes:
        log: steps between lines in ``metrics.jsonl``.
        show: steps between printed lines, a multiple of ``log``.
        steps_per_epoch: optimizer steps of one pass over the data. 0 for a stream.
        counts_epochs: whether the length of the run is given in epochs.
        every: the interval of each action by name. Actions without one are due at the end of each epoch.
    """

    log: int
    show: int
    steps_per_epoch: int
    counts_epochs: bool
    every: Mapping[str, Interval]
    _begun: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begun = dict.fromkeys(self.every, now())

    def logs(self, step: int, total: int) -> bool:
        """Whether a line of metrics is due."""
        return step == total or step % self.log == 0

    def shows(self, step: int, total: int) -> bool:
        """Whether that line is printed."""
        return step == total or step % self.show == 0

    def epoch_ends(self, step: int) -> bool:
        """Whether a step is the last one of an epoch, in a run that is counted in epochs."""
        return self.counts_epochs and step % self.steps_per_epoch == 0

    def due_by_clock(self) -> int:
        """Return the :data:`DUE_BITS` whose minutes have passed. The main worker sends them to the others."""
        timed = ((name, interval) for name, interval in self.every.items() if interval.unit == "minutes")
        return sum(DUE_BITS[name] for name, interval in timed if now() - self._begun[name] >= 60 * interval.size)

    def due(self, name: str, before: Mapping[str, int], after: Mapping[str, int], total: int, by_clock: int) -> bool:
        """Whether an action is due after a step.

        Args:
            name: one of :data:`DUE_BITS`.
            before: completed steps, samples and tokens before the step.
            after: completed steps, samples and tokens including the step.
            due_by_clock: result of the main worker's :meth:`due_by_clock` before the step.
        """
        interval, step = self.every.get(name), after["steps"]
        if interval is None:
            return step == total or self.epoch_ends(step)
        if interval.unit == "epochs":
            epochs = (Fraction(steps, self.steps_per_epoch) for steps in (before["steps"], step))
            return interval.passed(*epochs) or step == total
        if interval.unit == "minutes":
            if due := bool(by_clock & DUE_BITS[name]):
                self._begun[name] = now()
            return due or step == total
        return interval.passed(before[interval.unit], after[interval.unit]) or step == total


def log_intervals(total: int, chosen: int | None) -> tuple[int, int]:
    """Return the steps between lines in ``metrics.jsonl``, and between printed lines.

    By default the curves of a run have at least 100 points, with at most 100 steps between them. About 20 of these
    lines are printed.

    >>> log_intervals(60, None), log_intervals(1_000, None), log_intervals(100_000, None), log_intervals(1_000, 7)
    ((1, 3), (10, 50), (100, 5000), (7, 7))
    """
    if chosen is not None:
        return chosen, chosen
    log = min(max(total // CURVE_POINTS, 1), MAX_LOG_INTERVAL)
    return log, max(round(total / PRINTED_LINES / log), 1) * log


LOSS = "eval_loss"


BestMetric = tuple[str, Direction]
"""The name of a metric of the evaluation, and its better direction."""


def best_metric(run: Run) -> BestMetric | None:
    """Return the best metric of a run with loaded data, or None if no best checkpoint is kept.

    Raises:
        ConfigError: a best checkpoint is requested without validation data, or the metric does not exist.
    """
    config, training, sets = run.config, run.config.training, run.data.validation_sets()
    if not training.keeps_best:
        return None
    if not sets:
        flags = ("metric_for_best", "early_stopping_patience", "keep_best")
        requesting = next((flag for flag in flags if flag in config.origins), None)
        if requesting is None:
            return None
        message = "there is no validation data to choose the best checkpoint by"
        hint = "give a validation part, or leave it out"
        raise ConfigError(message, where=f"{spelling(requesting)} ({config.origin(requesting)})", hint=hint)
    if not run.overrides("compute_metrics"):
        if run.task and run.task.problem:  # the data determined the kind of labels
            config = config.replace("the data", problem_type=run.task.problem)
        check_metric(config, sets, of_task=run.task is not None, own_loss=run.overrides("compute_loss"))
    default = metric_name(next(iter(sets)), run.task.best_metric if run.task else LOSS)
    name = training.metric_for_best or default
    direction = training.metric_for_best_mode or direction_of(name)
    assert direction is not None  # guaranteed by rule RF098, and by a test for the metrics of tasks
    return name, direction


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
        position, sets, (name, direction) = self.run.position, self.run.data.validation_sets(), self.metric
        step, best = position.step, position.best
        position.evaluations_since_best += 1
        if name not in metrics:
            names = ", ".join(other for other in metrics if other != LOSS) or "nothing"
            problem = f"compute_metrics returns no '{name}' (it returns {names})"
            if best is not None and best["metric"] == name:
                say(self.run.workers, f"{problem}: step {step} is not a new best", loud=True)
                return
            self.metric = name, direction = metric_name(next(iter(sets)), LOSS), "min"
            say(self.run.workers, f"{problem}: the best checkpoint is the one with the lowest {name}", loud=True)
        own_set = next((own for own in sets if own and name.startswith(f"{own}/")), "")
        value, loss = metrics[name], metrics.get(metric_name(own_set, LOSS), math.inf)
        if not math.isfinite(value):
            say(self.run.workers, f"the {name} of step {step} is {value}: not a new best", loud=True)
            return
        is_better = best is None or best["metric"] != name  # that of another metric, before a resume, does not count
        if best and not is_better:
            is_better = value < best["value"] if direction == "min" else value > best["value"]
        if is_better:
            position.evaluations_since_best = 0
        best_loss = position.best_loss
        if is_better or (best and best["value"] == value and best_loss is not None and loss < best_loss):
            position.best = {"step": step, "metric": name, "value": value}
            position.best_loss = loss if math.isfinite(loss) else None

    @property
    def patience_reason(self) -> str | None:
        """Why the run should stop, if patience has run out. All workers decide the same."""
        evaluations, best = self.run.position.evaluations_since_best, self.run.position.best
        if self.patience is None or evaluations < self.patience:
            return None
        than = "a finite metric"
        if best:
            than = f"a better {best['metric']} than {best['value']:.6g} (the best step is {best['step']})"
        return f"{evaluations} evaluations without {than}"
