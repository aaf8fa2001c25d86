"""Evaluation: the exact mean loss over a data set, and the task's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rapidformer_templates.data.loader import MicroBatch, eval_requests, load, sample_lengths
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.planning.metrics import metric_name
from rapidformer_templates.run.hooks import checked_count, checked_metrics, checked_predictions
from rapidformer_templates.system.random_state import capture, restore
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Around forwards that must not disturb training: mode and random states are as before afterwards."""
    random_state, training = capture(), engine.model.training
    engine.model.eval()
    try:
        yield
    finally:
        engine.model.train(training)
        restore(*random_state)


class Evaluator:
    """Evaluates the engine's model on one data set, the work shared over the ranks.

    Args:
        samples: the data set.
        limit: batches an evaluation (micro batch × ranks samples each); None is all.
        name: of the set; its metrics are told as ``NAME/metric``, those of a set without a name as they are called.
        part: what the task knows the set as, where that is not its name.
    """

    def __init__(
        self,
        template: Template,
        engine: Engine,
        samples: Any,
        workers: Workers,
        limit: int | None = None,
        name: str = "",
        part: str | None = None,
    ) -> None:
        self.name = name
        self.part = name if part is None else part
        self.template = template
        self.engine = engine
        self.samples = samples
        self.workers = workers
        sizes = template.plan.sizes
        self.size = min(len(samples), limit * sizes.micro_batch * sizes.data) if limit else len(samples)
        self._requests = eval_requests(
            sample_lengths(samples, template.data, training=False),
            self.size,
            template.config.training.seed,
            rank=workers.data_rank,
            data_size=sizes.data,
            micro_batch=sizes.micro_batch,
        )

    @property
    def share(self) -> int:
        """Samples that this rank evaluates; where they do not come out even, some count nowhere."""
        return sum(len(request.samples) for request in self._requests)

    def evaluate(self, advance: Callable[[int], object] = lambda count: None) -> dict[str, float]:
        """``eval_loss`` (mean over the targets; NaN without any), ``perplexity`` of language models, task metrics.

        Training is not disturbed: mode and random states are as before afterwards.

        Args:
            advance: told how many samples of this rank are done.
        """
        if self.template.uses_task:
            self.template.task.begin_evaluation(self.part)
        with evaluating(self.engine), self.engine.averaged():
            if self.template.uses_task and self.template.task.looks_ahead:
                self.template.task.look_ahead(self.engine.eval_batch, self._microbatches(), self.workers)
            total, targets, results = self._results(advance)
        total, targets = self.workers.sum(total, targets)
        metrics = {"eval_loss": total / targets if targets else math.nan}
        if self.template.reports_perplexity:
            metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
        gathered = [entry for share in self.workers.gather(results) for entry in share]
        if gathered:
            gathered.sort(key=lambda entry: entry[0])
            task_metrics = self.template.compute_metrics([e[1] for e in gathered], [e[2] for e in gathered])
            metrics |= checked_metrics(task_metrics)
        return {metric_name(self.name, metric): value for metric, value in metrics.items()}

    def _microbatches(self) -> Iterator[MicroBatch]:
        return load(self.samples, self.template.data, self._requests, workers=0, pin_memory=False)

    def _results(self, advance: Callable[[int], object]) -> tuple[float, float, list[tuple[int, Any, Any]]]:
        """(sum of losses, targets, (sample, prediction, reference) of each sample) of this rank."""
        total = targets = 0.0
        results: list[tuple[int, Any, Any]] = []
        for microbatch in self._microbatches():
            microbatch.targets = 0 if microbatch.idle else checked_count(self.template.count_targets(microbatch.batch))
            loss, outputs = self.engine.eval_batch(microbatch)
            advance(len(microbatch.samples))
            if not self.workers.ends_pipeline:
                continue
            result = self.template.read_outputs(outputs, microbatch.batch)
            predictions, references = checked_predictions(result, len(microbatch.samples))
            if microbatch.idle or not self.workers.speaks:
                continue
            total += loss
            targets += microbatch.targets
            results += zip(microbatch.samples, predictions, references, strict=True)
        return total, targets, results


class Validation:
    """Evaluates the engine's model on each validation set of the run, one after another."""

    def __init__(self, template: Template, engine: Engine, workers: Workers) -> None:
        limit = template.config.training.eval_iters
        sets = template.data.validation_sets()
        self.evaluators = [Evaluator(template, engine, sets[name], workers, limit, name) for name in sets]

    @property
    def share(self) -> int:
        """Samples that this rank evaluates."""
        return sum(evaluator.share for evaluator in self.evaluators)

    def evaluate(self, advance: Callable[[int], object] = lambda count: None) -> dict[str, float]:
        """The metrics of all sets, in their order; ``advance`` as of :class:`Evaluator`."""
        metrics: dict[str, float] = {}
        for evaluator in self.evaluators:
            metrics |= evaluator.evaluate(advance)
        return metrics
