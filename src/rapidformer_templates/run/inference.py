"""Evaluation: the exact mean loss over a data set, and the task's metrics, also after the training or without it.

After the training, and without it, a template evaluates and predicts with one plain model in this process.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates.data.finetuning.tables import DataPart, LoadedDataset
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.loader import MicroBatch, eval_requests, load, on_device, sample_lengths
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.data.types import Batch, Data, SampleSet, kind_of
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.planning.environment import no_device
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.tasks import metric_name, metrics_of
from rapidformer_templates.run.building import build_data, build_engine
from rapidformer_templates.run.export import exported_weights
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.hooks import checked_count, checked_metrics, checked_predictions
from rapidformer_templates.run.predictions import (
    is_conversation,
    is_dataset,
    predict_samples,
    rows_of_frame,
    samples_as_part,
)
from rapidformer_templates.run.reference import precomputed_reference
from rapidformer_templates.run.run import Run, Template, begin_run
from rapidformer_templates.run.saved_model import exported_model
from rapidformer_templates.run.step_errors import locate_index_errors
from rapidformer_templates.run.watch import EVALUATION
from rapidformer_templates.system import accelerator, launch
from rapidformer_templates.system.process_state import kept_process_state
from rapidformer_templates.system.workers import Workers


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
        self._samples_name = f"{name or 'validation'} samples"
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

        Only language models with the loss of their task have a perplexity. Training is not affected: the mode and the
        random state are restored.

        Args:
            advance: called with the number of samples that this rank has completed.
        """
        run, task = self.run, self.run.task
        if task:
            task.begin_evaluation(self.part)
        run.engine.share_statistics()
        with evaluating(run.engine.model), run.engine.averaged():
            if task and task.needs_prepass:
                task.prepass(run.engine.eval_batch, (each for each, _ in self._microbatches()), run.workers)
            total, targets, results = self._results(advance)
        total, targets = run.workers.sum(total, targets)
        metrics = {"eval_loss": total / targets if targets else math.nan}
        if "perplexity" in metrics_of(run.config, own_loss=run.overrides("compute_loss")):
            metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
        gathered = [entry for share in run.workers.gather(results) for entry in share]
        if gathered:
            gathered.sort(key=lambda entry: entry[0])
            task_metrics = run.hooks.compute_metrics([e[1] for e in gathered], [e[2] for e in gathered])
            metrics |= checked_metrics(task_metrics)
        return {metric_name(self.name, metric): value for metric, value in metrics.items()}

    def _microbatches(self) -> Iterator[tuple[MicroBatch, Batch]]:
        """Yield each micro batch on the device, and its batch on the host. The next one is copied meanwhile."""
        run, on_host = self.run, deque[Batch]()

        def prepared(microbatch: MicroBatch) -> MicroBatch:
            on_host.append(microbatch.batch)
            return run.with_target_count(microbatch, self._samples_name)

        batches = map(prepared, run.load(self.samples, self._requests))
        for microbatch in on_device(batches, run.workers.device, ahead=1):
            run.watch.enter(EVALUATION, run.position.step)
            yield microbatch, on_host.popleft()

    def _results(self, advance: Callable[[int], object]) -> tuple[float, float, list[tuple[int, object, object]]]:
        """Return (sum of losses, targets, (sample, prediction, reference) of each sample) of this rank."""
        hooks, workers = self.run.hooks, self.run.workers
        losses, targets = list[torch.Tensor](), 0.0
        results: list[tuple[int, object, object]] = []
        for microbatch, batch in self._microbatches():
            with locate_index_errors(microbatch.samples, self._samples_name):
                loss, outputs = self.run.engine.eval_batch(microbatch)
            advance(len(microbatch.samples))
            if not workers.ends_pipeline:
                continue
            result = hooks.read_outputs(outputs, batch)
            predictions, references = checked_predictions(result, len(microbatch.samples))
            if microbatch.idle or not workers.is_replica_leader:
                continue
            losses.append(loss)
            targets += microbatch.targets
            results += zip(microbatch.samples, predictions, references, strict=True)
        return sum(map(float, losses)), targets, results


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


Weights = Mapping[str, torch.Tensor]


def copied_weights(engine: Engine, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Weights:
    """Return copies of the weights that a run exports, on the host of rank 0. Empty elsewhere. Call it on every rank.

    Args:
        copy: copies a tensor.
    """
    with exported_weights(engine) as weights:
        return {name: copy(tensor) for name, tensor in weights}


def is_plain(run: Run) -> bool:
    """Whether the model of a run is unsharded, in this process, and has the weights that are exported."""
    return type(run.engine) is SingleEngine and run.config.training.ema_decay is None


def build_single_process(template: Template, weights: Weights | None) -> Run:
    """Build the model in this process, unsharded and without wrappers.

    Args:
        weights: trained weights. None keeps those of ``build_model``.

    Raises:
        ConfigError: this process is a worker, or there is no such device. Or the reference was precomputed and not
            stored, and is not the model as built.
    """
    if launch.is_worker():
        message = "this process is one of several workers, and none of them has the model to itself"
        hint = "evaluate and predict in a program of one process, or with rapidformer evaluate and predict"
        raise ConfigError(message, where=f"{type(template).__name__}", hint=hint)
    with kept_process_state(), _single_process_plan(template):
        device = template.plan.device
        if not accelerator.is_available(device):
            raise ConfigError(no_device(device), where=template.config.origin("device"))
        workers = Workers(rank=0, local_rank=0, world=1, device=accelerator.device_of(device, 0))
        run = begin_run(template, workers, trains=False)
        if template.reads_task_data and not template.config.data.is_named:
            # The task without any data: the model is trained, and its folder knows the labels and columns.
            path, run.task = run.config.model.pretrained_model_name_or_path, run.hooks.task
            if not run.task.is_trained:
                run.task.load_label_state(exported_model(Path(path)).decisions(run.task.name) if path else {})
            run.data, run.hooks.uses_task, run.hooks.tokenizer = Data(train=None), True, run.task.tokenizer
        else:
            build_data(run)
        build_engine(run)
        precomputed = precomputed_reference(run)
        if precomputed is not None:
            # Read from the run folder, or computed here with the model as built.
            folder = RunFolder(run.config.training.save) if run.config.training.save else None
            saved = folder if folder is not None and folder.reference.is_file() else None
            if saved is None and run.config.training.load:
                message = "the reference was computed once, and its log-probabilities were not saved"
                hint = "give --save FOLDER, in which the run keeps them, or train without --precompute-reference"
                raise ConfigError(message, where="--precompute-reference", hint=hint)
            precomputed.attach(saved, saved=saved)
    if weights is not None:
        run.engine.load(_WeightReader(weights), optimizer=False)
    run.model.eval()
    return run


def evaluate(template: Template, run: Run, data: Any = None) -> dict[str, float]:
    """Evaluate a model on the validation data, or on other data.

    Args:
        data: a data set like ``Data.valid``. For a task it may also be rows with the task's columns and labels.

    Raises:
        DataError: there is no data, or a row cannot be used.
    """
    own = run.task, run.data
    samples: Any
    part, data = "", rows_of_frame(data)
    if data is None:
        samples = run.data.validation_sets()
    elif run.task and _has_columns(data):
        own = _read_rows(run.task, data)
        samples = own[1].valid
    else:
        samples, part = data, _part_of(run, data)
    if not hasattr(samples, "__len__") and samples is not None:
        hint = "make a list of it, or give it __len__ and __getitem__"
        raise DataError(f"{kind_of(samples)} has no length", where="evaluate()", hint=hint)
    if samples is None or not len(samples):
        hint = "pass it: evaluate(data), or give the template a validation part"
        raise DataError("there is no data to evaluate on", where="evaluate()", hint=hint)
    with kept_process_state(), _single_process_plan(template):
        if data is None:
            return Validation(run).evaluate()
        with _used(template, run, *own):
            return Evaluator(run, samples, part=part).evaluate()


@contextmanager
def _used(template: Template, run: Run, task: Task | None, data: Data) -> Iterator[None]:
    """Use other data and the task for them inside the context, also in the hooks."""
    before = run.task, run.data
    if task is run.task:
        yield
        return
    run.task, run.data = vars(template)["task"], _ = task, data
    try:
        yield
    finally:
        run.task, run.data = vars(template)["task"], _ = before


def predict(template: Template, run: Run, samples: Any, batch_size: int, generation: Generation) -> Any:
    """Predict samples: a record for each sample of a task, otherwise the results of ``read_outputs``.

    Args:
        samples: one sample, or a list, a ``datasets.Dataset`` or a pandas ``DataFrame`` of samples.

    Returns:
        A list, or a single result for one sample.

    Raises:
        DataError: a sample cannot be used.
        ConfigError: nothing defines how to read the model's outputs.
    """
    task, samples = run.task, rows_of_frame(samples)
    is_single = not isinstance(samples, list) and not is_dataset(samples)
    is_single |= task is not None and task.chat_column is not None and is_conversation(samples)
    several = [samples] if is_single else samples
    predictions: Sequence[object]
    if task is not None:
        with kept_process_state():
            predictions = predict_samples(task, run.model, several, batch_size, generation)
    else:
        with kept_process_state(), _single_process_plan(template), evaluating(run.engine.model):
            predictions = _read(run, several, batch_size)
    return predictions[0] if is_single else predictions


def _read(run: Run, samples: Sequence[object], batch_size: int) -> list[object]:
    """Return the results of ``read_outputs`` for samples in the form of the template's own data."""
    requests = eval_requests(None, len(samples), 0, rank=0, data_size=1, micro_batch=batch_size)
    results: dict[int, object] = {}
    for microbatch in load(samples, run.data, requests, workers=0, pin_memory=False):
        microbatch.targets = checked_count(run.hooks.count_targets(microbatch.batch))
        run.index_limits.check(microbatch, "samples")
        with locate_index_errors(microbatch.samples, "samples"):
            _, outputs = run.engine.eval_batch(microbatch)
        read, _ = checked_predictions(run.hooks.read_outputs(outputs, microbatch.batch), len(microbatch.samples))
        results |= dict(zip(microbatch.samples, read, strict=True))
    predictions = [results[place] for place in range(len(samples))]
    if predictions and all(prediction is None for prediction in predictions):
        message = "cannot tell how to read predictions from the outputs of the model"
        hint = "override read_outputs(self, outputs, batch), or call the model itself: .model"
        raise ConfigError(message, where=f"{type(run.hooks).__name__}.predict()", hint=hint)
    return predictions


def _has_columns(data: object) -> bool:
    """Whether data are rows with the columns of the task's files, not samples of the template's own data.

    Raises:
        DataError: the data are several parts by name.
    """
    if is_dataset(data):
        return "input_ids" not in data.column_names
    if isinstance(data, Mapping) and data:
        names = ", ".join(map(str, data))
        hint = f"choose one of them: data['{next(iter(data))}']"
        raise DataError(f"the data are several parts or columns ({names})", where="evaluate()", hint=hint)
    return isinstance(data, list | tuple) and all(isinstance(row, Mapping) for row in data)


def _read_rows(task: Task, data: Any) -> tuple[Task, Data]:
    """Read rows in memory like those of a task's files. Returns (a task for these rows, its data).

    Raises:
        DataError: a row cannot be used, or the task learns from a corpus, which has no rows.
    """
    part = samples_as_part(data)
    read_parts: list[DataPart] = []
    alone = {"data_name": None, "eval_data_name": None, "streaming": False, "evaluate_test": False}
    changed = {name: value for name, value in alone.items() if task.config.get(name) != value}
    own_task = task.for_other_data(task.config.replace("evaluate()", **changed) if changed else task.config)

    def read_rows() -> LoadedDataset:
        read_parts.append(part)
        return own_task.unread_rows(part)

    own_task.read_rows = read_rows  # type: ignore[method-assign]
    own_data = own_task.read_data()
    if not read_parts:
        message = f"--task {task.name} learns from a corpus, which has no rows"
        raise DataError(message, where="evaluate()", hint="pass a data set like Data.valid, or evaluate without data")
    return own_task, own_data


def _part_of(run: Run, data: object) -> str:
    """Return the name under which the task knows a data set.

    Raises:
        DataError: the task needs the name for its metrics, and the data set is unknown.
    """
    parts = {**run.data.validation_sets(), TEST: run.data.test}
    part_name = next((name for name, samples in parts.items() if samples is data), None)
    if part_name is None and run.task and type(run.task).begin_evaluation is not Task.begin_evaluation:
        hint = "pass rows with the task's columns, or a part of the template's own data"
        raise DataError("the metrics of these samples are unknown", where="evaluate()", hint=hint)
    return part_name or ""


@contextmanager
def _single_process_plan(template: Template) -> Iterator[None]:
    """Plan for a single process inside the context. Switches stay active only if they change the exported model."""
    plan, attributes = template.trained_plan, vars(template)
    before = attributes.get("plan")
    attributes["plan"] = Plan(
        template=plan.template,
        switches=tuple(name for name in plan.switches if REGISTRY[name].exported),
        sizes=Sizes(micro_batch=plan.sizes.micro_batch, global_batch=plan.sizes.global_batch),
        device=plan.device,
        precision=plan.precision,
        values=plan.values,
    )
    try:
        yield
    finally:
        del attributes["plan"]
        if before is not None:
            attributes["plan"] = before


@dataclasses.dataclass(frozen=True)
class _WeightReader:
    """Weights in memory with the interface of a checkpoint reader."""

    weights: Weights

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items() if kind == "weights"}

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        box = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        return self.weights[name][box]
