"""Evaluation: the exact mean loss over a data set, and the task's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rapidformer_templates.data.loader import MicroBatch, eval_requests, load, sample_lengths
from rapidformer_templates.data.types import SampleSet
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.tasks import metric_name, metrics_of
from rapidformer_templates.run.hooks import checked_count, checked_metrics, checked_predictions
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.step_errors import locate_index_errors
from rapidformer_templates.run.watch import EVALUATION


class Evaluator:
    """Evaluates the engine's model on one data set. The ranks share the work.

    Args:
        samples: the data set.
        limit: number of samples per evaluation. None means all.
        name: name of the set. Its metrics are reported as ``NAME/metric``, or without a prefix if the name is empty.
        part: name under which the task knows the set, if it differs.
    """

    def __init__(
        self, run: Run, samples: SampleSet, limit: int | None = None, name: str = "", part: str | None = None
    ) -> None:
        self.run, self.samples = run, samples
        self.name = name
        self.part = name if part is None else part
        sizes = run.plan.sizes
        self.size = min(len(samples), limit) if limit else len(samples)
        self._requests = eval_requests(
            sample_lengths(samples, run.data, training=False),
            self.size,
            run.config.training.seed,
            rank=run.workers.data_rank,
            data_size=sizes.data,
            micro_batch=sizes.micro_batch,
        )

    @property
    def share(self) -> int:
        """Number of samples that this rank evaluates, including fill-in samples that do not count in the metrics."""
        return sum(len(request.samples) for request in self._requests)

    def evaluate(self, advance: Callable[[int], object] = lambda count: None) -> dict[str, float]:
        """Return ``eval_loss`` (mean over the targets, NaN without any), ``perplexity`` and the task's metrics.

        Only language models have a perplexity. Training is not affected: the mode and the random state are restored.

        Args:
            advance: called with the number of samples that this rank has completed.
        """
        run, task = self.run, self.run.task
        if task:
            task.begin_evaluation(self.part)
        with evaluating(run.engine.model), run.engine.averaged():
            if task and task.needs_prepass:
                task.prepass(run.engine.eval_batch, self._microbatches(), run.workers)
            total, targets, results = self._results(advance)
        total, targets = run.workers.sum(total, targets)
        metrics = {"eval_loss": total / targets if targets else math.nan}
        if "perplexity" in metrics_of(run.config):
            metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
        gathered = [entry for share in run.workers.gather(results) for entry in share]
        if gathered:
            gathered.sort(key=lambda entry: entry[0])
            task_metrics = run.hooks.compute_metrics([e[1] for e in gathered], [e[2] for e in gathered])
            metrics |= checked_metrics(task_metrics)
        return {metric_name(self.name, metric): value for metric, value in metrics.items()}

    def _microbatches(self) -> Iterator[MicroBatch]:
        for microbatch in load(self.samples, self.run.data, self._requests, workers=0, pin_memory=False):
            self.run.index_limits.check(microbatch, self._samples_name)
            self.run.watch.enter(EVALUATION, self.run.position.step)
            yield microbatch

    @property
    def _samples_name(self) -> str:
        return f"{self.name or 'validation'} samples"

    def _results(self, advance: Callable[[int], object]) -> tuple[float, float, list[tuple[int, object, object]]]:
        """Return (sum of losses, targets, (sample, prediction, reference) of each sample) of this rank."""
        hooks, workers = self.run.hooks, self.run.workers
        total = targets = 0.0
        results: list[tuple[int, object, object]] = []
        for microbatch in self._microbatches():
            microbatch.targets = 0 if microbatch.idle else checked_count(hooks.count_targets(microbatch.batch))
            with locate_index_errors(microbatch.samples, self._samples_name):
                loss, outputs = self.run.engine.eval_batch(microbatch)
            advance(len(microbatch.samples))
            if not workers.ends_pipeline:
                continue
            result = hooks.read_outputs(outputs, microbatch.batch)
            predictions, references = checked_predictions(result, len(microbatch.samples))
            if microbatch.idle or not workers.is_replica_leader:
                continue
            total += loss
            targets += microbatch.targets
            results += zip(microbatch.samples, predictions, references, strict=True)
        return total, targets, results


class Validation:
    """Evaluates the engine's model on each validation set of the run, one after another.

    Args:
        test: evaluate the test part instead, without a prefix in the names of the metrics.
        limit: number of samples of each set. By default ``--eval-iters`` global batches, which no layout changes.
    """

    def __init__(self, run: Run, *, test: bool = False, limit: int | None = None) -> None:
        limit = limit or (run.config.training.eval_iters or 0) * run.plan.sizes.global_batch
        sets = run.data.validation_sets()
        self.evaluators = [Evaluator(run, samples, limit, name) for name, samples in sets.items()]
        if test:
            self.evaluators = [Evaluator(run, run.data.test, part=TEST)] if run.data.test is not None else []

    @property
    def share(self) -> int:
        """Number of samples that this rank evaluates."""
        return sum(evaluator.share for evaluator in self.evaluators)

    def evaluate(self, advance: Callable[[int], object] = lambda count: None) -> dict[str, float]:
        """Return the metrics of all sets, in their order. For ``advance`` see :class:`Evaluator`."""
        metrics: dict[str, float] = {}
        for evaluator in self.evaluators:
            metrics |= evaluator.evaluate(advance)
        return metrics
