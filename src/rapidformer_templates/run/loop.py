"""The only training loop. It names no switch and imports no backend. The engine owns the step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer_templates.data.loader import MicroBatch, load, on_device, train_requests
from rapidformer_templates.data.order import Order
from rapidformer_templates.data.types import Bookmark
from rapidformer_templates.engines.contract import Engine, StepResult
from rapidformer_templates.engines.recipe import Schedule
from rapidformer_templates.errors import Interrupted, NonFiniteLoss
from rapidformer_templates.run import device_failure
from rapidformer_templates.run.best import LOSS, BestMetric, loss_beside, loss_of
from rapidformer_templates.run.callbacks import notify, states_of
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.console import say
from rapidformer_templates.run.evaluation import Validation, evaluating
from rapidformer_templates.run.folder import MetricsFile, RunFolder
from rapidformer_templates.run.hooks import checked_count
from rapidformer_templates.run.index_limits import locate_index_errors
from rapidformer_templates.run.intervals import EVALUATE, SAVE, Intervals
from rapidformer_templates.run.meter import Meter
from rapidformer_templates.run.profiler import DATA, EXCHANGE, REST, TRAIN, Profile
from rapidformer_templates.run.progress import Progress
from rapidformer_templates.run.tracking import Trackers
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.signals import StopRequest
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.run.receipts import Receipts
    from rapidformer_templates.run.template import Template


@dataclass
class Position:
    """The progress of a run, saved with each checkpoint.

    Attributes:
        step: number of completed optimizer steps.
        samples, tokens: number consumed since the start of the run.
        best: step, metric and value of the best evaluation so far, if the run tracks one.
        best_loss: the loss of that evaluation. It decides between equal values of the metric.
        evaluations_since_best: number of evaluations since the metric was last better than before.
        data: everything that the order of the data depends on. A resumed run must match it.
        base: identity of the frozen weights under adapters, which are not in the checkpoint. None without adapters.
        stream: position in a stream of samples. None if the data is not a stream.
        callbacks: states of the callbacks by name.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    best: dict[str, Any] | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    stream: Bookmark | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Completed steps, samples and tokens: the units of an interval."""
        return {"steps": self.step, "samples": self.samples, "tokens": self.tokens}

    def to_state(self) -> dict[str, Any]:
        """Return the values for a checkpoint. ``waited`` is the key of the evaluations since the best one."""
        state = dataclasses.asdict(self)
        state["waited"] = state.pop("evaluations_since_best")
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Restore the values of a checkpoint. An older version saved fewer of them."""
        values = {**state, "evaluations_since_best": state.get("waited", 0)}
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


def with_target_count(template: Template, microbatch: MicroBatch, name: str = "training samples") -> MicroBatch:
    """Record what the host must know about a micro batch (targets, size, masks) before it moves to the device.

    Args:
        name: what its samples are called in messages.

    Raises:
        DataError: a token id or a label is outside of the model's tables.
    """
    template.index_limits.check(microbatch, name)
    microbatch.targets = 0 if microbatch.idle else checked_count(template.count_targets(microbatch.batch))
    microbatch.size = (microbatch.sample_count, microbatch.tokens)
    microbatch.inspect_masks()
    return microbatch


@dataclass
class Loop:
    """A training run with all its parts. :meth:`run` is the loop.

    Attributes:
        total: optimizer steps of the whole run. After an early stop, the steps that were done.
        keep_checkpoints: number of checkpoints to keep.
        metric: selects the best checkpoint. None keeps no best one.
        patience: evaluations without an improvement before the run stops early. None never stops it early.
        early_stop_reason: reason for an early stop. None if the run did not stop early.
        saver: saves checkpoints in the background. None saves synchronously.
        profile: profiles some steps of this worker.
        trackers: the trackers, on the main worker only. None if there are none.
        progress: the progress display.
    """

    template: Template
    engine: Engine
    order: Order
    validation: Validation | None
    schedule: Schedule
    position: Position
    total: int
    intervals: Intervals
    workers: Workers
    folder: RunFolder | None
    metrics: MetricsFile | None
    meter: Meter
    receipts: Receipts
    keep_checkpoints: int
    metric: BestMetric | None
    patience: int | None = None
    saver: AsyncSaver | None = None
    profile: Profile | None = None
    trackers: Trackers | None = None
    progress: Progress = field(init=False)
    early_stop_reason: str | None = field(init=False, default=None)
    _evaluated_step: int = field(init=False, default=-1)
    _saved_step: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._stop_if_patience_ended()  # a run that stopped early is complete, but a larger patience continues it

    def run(self, stop: StopRequest, progress: Progress) -> dict[str, float]:
        """Train to the end and return the metrics of the last evaluation.

        Raises:
            NonFiniteLoss: the loss or gradient is not finite. The error names the step and its samples. The weights are
                as before that step.
            Interrupted: the run was asked to stop. If it has a run folder, it has saved a checkpoint.
            CheckpointError: a checkpoint could not be saved.
            DeviceFailed: the device reported an error. The error names the step.
        """
        with (
            contextlib.closing(self.saver) if self.saver else contextlib.nullcontext(),
            device_failure.locate_errors(lambda: self.position.step, self._resume_hint()),
        ):
            return self._run(stop, progress)

    def _run(self, stop: StopRequest, progress: Progress) -> dict[str, float]:
        self.progress = progress
        metrics: dict[str, float] = {}
        result: StepResult | None = None
        batches = self._batches()
        notify(self.template, "on_train_start")
        states_of(self.template.callbacks)  # fail now, not at the first checkpoint, if a state cannot be saved
        while (step := self.position.step) < self.total:
            if self.profile:
                self.profile.step_begins()

            # 1. Load the micro batches of this rank. The samples depend only on the seed and the step.
            with self._profiled(DATA):
                microbatches = [next(batches) for _ in range(self.template.plan.sizes.accumulation)]

            # 2. Agree on what all ranks must know before the forward: the number of targets, whether to stop, and
            #    whether a background save has progressed on every rank. The hosts exchange this while the devices
            #    still compute the previous step.
            counting = [m for m in microbatches if not m.idle and self.workers.is_replica_leader]
            with self._profiled(EXCHANGE):
                targets, samples, tokens, stop_requested, ended, saving, minutes_due = self.workers.sum(
                    sum(m.targets for m in counting),
                    sum(m.sample_count for m in counting),
                    sum(m.tokens for m in counting),
                    stop.is_requested,
                    self.template.stop_reason is not None,
                    self.saver is not None and self.saver.busy,
                    self.intervals.due_by_clock() if self.workers.is_main else 0,
                )
            if self.saver and self.saver.pending and not saving:
                self._announce_checkpoint(self.saver.proceed())
            if ended:  # a hook of some rank has called stop() in the previous step, which was the last one
                return self._end_early(result, metrics)

            # 3. Forward, backward, clipping and update.
            # Receipts are recorded in the first step of this process. Later steps have no overhead.
            is_first = self.meter.steps == 0
            recording = self.receipts.watch(microbatches) if is_first else contextlib.nullcontext()
            with self._profiled(TRAIN), recording:
                result = self._step(step, microbatches, targets)

            # 4. Update the counters.
            with self._profiled(REST):
                self.receipts.count(microbatches)
                if is_first:
                    self.receipts.check()
                before = self.position.counts
                self.position.step = done = step + 1
                self.position.stream = microbatches[-1].bookmark
                self.position.samples += int(samples)
                self.position.tokens += int(tokens)
                self.meter.step(int(samples), int(tokens))
                notify(self.template, "on_step_end", done, result)
                progress.advance(result.loss)
            if self.profile and self.profile.step_ends():
                self.profile = None

            # 5. Log, evaluate, save. In this order, the metrics of a step are written before its checkpoint.
            progress_counts = before, self.position.counts
            if self.intervals.logs(done, self.total):
                self._log(result, step)
            if self.validation and self.intervals.due(EVALUATE, *progress_counts, self.total, int(minutes_due)):
                metrics = self._evaluate()
                self._stop_early(result)
            self._after_step(done)
            if (
                self.intervals.due(SAVE, *progress_counts, self.total, int(minutes_due))
                or stop_requested
                or self._is_best
            ):
                self._save()
            self._stop_if_requested(bool(stop_requested), done)
        return metrics

    def _after_step(self, done: int) -> None:
        """Flush the trackers, and call ``on_epoch_end`` at the end of an epoch."""
        if self.trackers:
            self.trackers.flush()
        if self.intervals.epoch_ends(done):
            notify(self.template, "on_epoch_end", done // self.intervals.steps_per_epoch)

    def _stop_early(self, result: StepResult) -> None:
        """Stop the run if patience has run out, and log this step as the last one."""
        step, logged = self.position.step, self.intervals.logs(self.position.step, self.total)
        self._stop_if_patience_ended()
        if self.early_stop_reason:
            say(self.workers, f"stopped early {self.early_stop_reason}")
            if not logged:
                self._log(result, step - 1)

    def _stop_if_patience_ended(self) -> None:
        """End the run at the current step if patience has run out. All workers decide the same."""
        step, evaluations, best = self.position.step, self.position.evaluations_since_best, self.position.best
        if self.patience is None or evaluations < self.patience or step >= self.total:
            return
        than = (
            f"a better {best['metric']} than {best['value']:.6g} (the best step is {best['step']})"
            if best
            else "a finite metric"
        )
        self.early_stop_reason = f"after step {step} of {self.total}: {evaluations} evaluations without {than}"
        self.total = step

    def _end_early(self, result: StepResult | None, metrics: dict[str, float]) -> dict[str, float]:
        """End the run at the current step because a hook called ``stop()``. Do what is due after the last step.

        Args:
            result: result of the last step. None if this process made none.
            metrics: metrics of the last evaluation.
        """
        step, total, self.total = self.position.step, self.total, self.position.step
        reason = next(reason for reason in self.workers.gather(self.template.stop_reason) if reason is not None)
        self.early_stop_reason = f"after step {step} of {total}: {reason}"
        say(self.workers, f"stopped early {self.early_stop_reason}")
        if result is None:
            return metrics
        if not self.intervals.logs(step, total):
            self._log(result, step - 1)
        if self.validation and self._evaluated_step != step:
            metrics = self._evaluate()
        if self._saved_step != step:
            self._save()
        self._wait_for_save()
        return metrics

    def _stop_if_requested(self, is_requested: bool, done: int) -> None:
        """Wait for the last save. Raise :class:`Interrupted` if a stop was requested before the last step."""
        if is_requested or done == self.total:
            self._wait_for_save()
        if is_requested and done < self.total:
            hint, saved = self._resume_hint(), self.folder is not None
            raise Interrupted(f"stopped after step {done}, as requested", hint=hint, saved=saved)

    @property
    def exported_step(self) -> int:
        """Step of the weights that are evaluated and exported after the training: the best one, or the last one."""
        best = self.position.best
        return int(best["step"]) if best and self.folder else self.position.step

    @property
    def epoch(self) -> float:
        """Completed passes over the data. For a stream, a whole number."""
        stream = self.position.stream
        return round(stream["epoch"] if stream else self.order.epoch(self.position.step), 6)

    def _batches(self) -> Iterator[MicroBatch]:
        plan, data = self.template.plan, self.template.config.data
        requests = train_requests(
            self.order,
            self.position.step,
            self.total,
            rank=self.workers.data_rank,
            data_size=plan.sizes.data,
            accumulation=plan.sizes.accumulation,
        )
        is_async = accelerator.is_asynchronous(self.workers.device)
        workers = data.dataloader_num_workers if data.dataloader_num_workers is not None else (2 if is_async else 0)
        pin = data.dataloader_pin_memory if data.dataloader_pin_memory is not None else is_async
        assert self.template.data.train is not None
        batches = load(self.template.data.train, self.template.data, requests, workers=workers, pin_memory=pin)
        # The host counts targets before a batch moves to the device. The batches of the next step are copied while
        # this step is computed.
        return on_device(
            (with_target_count(self.template, batch) for batch in batches),
            self.workers.device,
            ahead=plan.sizes.accumulation,
        )

    def _profiled(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return self.profile.part(name) if self.profile else contextlib.nullcontext()

    def _step(self, step: int, microbatches: list[MicroBatch], targets: float) -> StepResult:
        task = self.template.task if self.template.uses_task else None
        samples = [sample for microbatch in microbatches for sample in microbatch.samples]
        with self._locate_errors(step), locate_index_errors(samples, "training samples"):
            if task and task.measures:
                task.begin_step(microbatches)
            if task and task.needs_prepass:
                with evaluating(self.engine):
                    task.prepass(self.engine.eval_batch, microbatches, self.workers)
            result = self.engine.train_batch(microbatches, targets, self.schedule(step))
        if task and task.measures:
            result.measured = {**result.measured, **task.measured(self.workers)}
        return result

    def _raise_pending_errors(self) -> None:
        """Raise errors of earlier steps before anything about them is logged or saved."""
        with self._locate_errors(self.position.step - 1):
            self.engine.raise_pending_errors()

    @contextlib.contextmanager
    def _locate_errors(self, newest: int) -> Iterator[None]:
        """Add the step and its samples to a :class:`NonFiniteLoss`. ``newest`` is the last step that was started."""
        try:
            yield
        except NonFiniteLoss as error:
            self._wait_for_save()
            step = newest - error.age
            samples = self.order.step(step)[0].tolist()
            raise NonFiniteLoss(
                f"step {step + 1}: {error.message}; the weights are from after step {step}",
                where=f"training samples {samples[:32]}{' …' if len(samples) > 32 else ''}",
                hint="check these samples; a lower --lr, --clip-grad or bf16 instead of fp16 may help; "
                + self._resume_hint(),
            ) from None

    def _resume_hint(self) -> str:
        return "continue with --resume" if self.folder else "nothing was saved: there is no --save"

    def _log(self, result: StepResult, step: int) -> None:
        self._raise_pending_errors()
        line = {
            "step": step + 1,
            "epoch": self.epoch,
            "loss": float(result.loss),
            "grad_norm": float(result.grad_norm),
            **{name: float(value) for name, value in result.measured.items()},
            "lr": self.template.peak_lr * self.schedule(step),
            "samples": self.position.samples,
            "tokens": self.position.tokens,
            **self.meter.window(),
            "skipped": bool(result.skipped),
        }
        if self.intervals.shows(step + 1, self.total):
            self.progress.logged(line)
        self.record(line)

    def record(self, line: Mapping[str, Any]) -> None:
        """Write a line of metrics to the file and the trackers."""
        if self.metrics:
            self.metrics.write(line)
        if self.trackers:
            self.trackers.log(line)

    def _evaluate(self) -> dict[str, float]:
        assert self.validation is not None
        self._raise_pending_errors()
        with self.meter.paused():
            metrics = self.validation.evaluate()
        step = self._evaluated_step = self.position.step
        self.progress.evaluated(step, metrics)
        self.record({"step": step, "epoch": self.epoch, **metrics})
        if self.metric is not None:
            self._update_best(self.metric, step, metrics)
        notify(self.template, "on_evaluate", step, metrics)
        return metrics

    def _update_best(self, metric: BestMetric, step: int, metrics: Mapping[str, float]) -> None:
        """Remember this step if it is the best so far. A lower loss decides between equal values.

        The names of a user's metrics are unknown until the first evaluation. If ``metric`` is not among them, use the
        loss instead.
        """
        best, sets = self.position.best, self.template.data.validation_sets()
        self.position.evaluations_since_best += 1
        if metric.name not in metrics:
            names = ", ".join(name for name in metrics if name != LOSS) or "nothing"
            problem = f"compute_metrics returns no '{metric.name}' (it returns {names})"
            if best is not None and best["metric"] == metric.name:
                say(self.workers, f"{problem}: step {step} is not a new best", loud=True)
                return
            self.metric = metric = loss_of(sets)
            say(self.workers, f"{problem}: the best checkpoint is the one with the lowest {metric.name}", loud=True)
        value, loss = metrics[metric.name], metrics.get(loss_beside(metric.name, sets), math.inf)
        best_loss = self.position.best_loss
        if not math.isfinite(value):
            say(self.workers, f"the {metric.name} of step {step} is {value}: not a new best", loud=True)
            return
        is_better = metric.improves(value, best)
        if is_better:
            self.position.evaluations_since_best = 0
        if is_better or (best and best["value"] == value and best_loss is not None and loss < best_loss):
            self.position.best = {"step": step, "metric": metric.name, "value": value}
            self.position.best_loss = loss if math.isfinite(loss) else None

    @property
    def _is_best(self) -> bool:
        """Whether the last step is the best one. Its weights must be saved before the next step changes them."""
        return self.position.best is not None and self.position.best["step"] == self.position.step

    def _save(self) -> None:
        self._saved_step = self.position.step
        if self.folder is None:
            return
        self._raise_pending_errors()
        with self.meter.paused():
            if self.metrics:
                self.metrics.sync()
            root, step = self.folder.checkpoints, self.position.step
            self.position.callbacks = states_of(self.template.callbacks)
            progress = self.position.to_state()
            best = self.position.best["step"] if self.position.best else None
            if self.saver:
                self._wait_for_save()
                self.saver.start(step, self.engine, progress, best)
                return
            path: Path = checkpoint.save(root, step, self.engine, progress, self.workers)
            problem = checkpoint_check.delete_older(path, self.keep_checkpoints, best, self.workers)
            if problem:
                say(self.workers, problem, loud=True)
        self._announce_checkpoint(path)

    def _wait_for_save(self) -> None:
        if self.saver:
            with self.meter.paused():
                self._announce_checkpoint(self.saver.wait())

    def _announce_checkpoint(self, path: Path | None) -> None:
        """Report a complete checkpoint."""
        if path:
            self.progress.saved(checkpoint.step_of(path), path)
            notify(self.template, "on_checkpoint", checkpoint.step_of(path), path)
