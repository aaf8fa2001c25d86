"""The only training loop. It names no switch and imports no backend. The engine owns the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from statistics import fmean

from rapidformer_templates.data.loader import MicroBatch, on_device, train_requests
from rapidformer_templates.data.order import Stream
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.errors import Interrupted, NonFiniteLoss, RapidformerError, ReplicasDiffer
from rapidformer_templates.run import step_errors, watch
from rapidformer_templates.run.folder import MetricsLine
from rapidformer_templates.run.hooks import checked_schedule, states_of
from rapidformer_templates.run.inference import Validation
from rapidformer_templates.run.log import LayerGradNorms, Log, Means
from rapidformer_templates.run.performance import DATA, EXCHANGE, REST, TRAIN, Meter, open_profile
from rapidformer_templates.run.receipts import Receipts
from rapidformer_templates.run.replica_check import replica_check_of
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.saving import Checkpoints
from rapidformer_templates.run.steps import EVALUATE, SAVE, BestMetric, BestStep, Intervals, count_steps, log_intervals
from rapidformer_templates.run.watch import LOGGING, StragglerCheck
from rapidformer_templates.system import phase_clock
from rapidformer_templates.system.processes import StopRequest
from rapidformer_templates.system.terminal import say


class Loop:
    """The training loop of a run. :meth:`train` is the loop, and the other parts act in it.

    Args:
        metric: selects the best checkpoint. None keeps no best one.

    Attributes:
        run: the run, whose position the loop moves to the end.
        total: optimizer steps of the whole run. After an early stop, the steps that were done.
        log: records the metrics.
        meter: measures throughput and memory.
        receipts: measure the effects of the switches in the first step.
        stragglers: finds workers that are slower than others.
        validation: evaluates the model. None without validation data.
        early_stop_reason: reason for an early stop. None if the run did not stop early.
    """

    def __init__(self, run: Run, metric: BestMetric | None) -> None:
        training = run.config.training
        self.run, self.total = run, count_steps(run)
        log_every, show_every = log_intervals(self.total, training.log_interval)
        self.log = Log(run, self.total)  # before the meter, which would measure how long the trackers need
        self.meter = Meter(run.workers.device)
        self.schedule = checked_schedule(run.hooks.build_scheduler(self.total))
        self.intervals = Intervals(
            log=log_every,
            show=show_every,
            steps_per_epoch=run.order.steps_per_epoch,
            counts_epochs=not {"epochs", "train_iters"}.isdisjoint(training.in_epochs),
            every={n: i for n, i in ((EVALUATE, training.eval_interval), (SAVE, training.save_interval)) if i},
        )
        self.receipts = Receipts(run, run.order)
        self.stragglers = StragglerCheck(run.workers, run.config.launch.straggler_factor)
        self.validation = Validation(run) if run.data.validation_sets() else None
        self.best = BestStep(run, metric, training.early_stopping_patience) if metric else None
        self.checkpoints = Checkpoints(run, run.folder, self.log, self.meter) if run.folder else None
        self.replica_check = replica_check_of(run)
        self.profile = open_profile(run, self.total - run.position.step)
        self.early_stop_reason: str | None = None
        self._means = Means(run.position.sums)
        self._layer_grad_norms = LayerGradNorms(run.engine) if training.log_layer_grad_norms else None
        self._hooks_log = True  # whether hooks of any worker may have logged numbers since the last line
        run.logged = {}
        self._evaluated_step = self._saved_step = -1
        self._stop_if_patience_ended()  # a run that stopped early is complete, but a larger patience continues it

    def train(self, stop: StopRequest) -> dict[str, float]:
        """Train to the end and return the metrics of the last evaluation.

        Raises:
            NonFiniteLoss: the loss or gradient is not finite. The error names the step and its samples. The weights are
                as before that step.
            Interrupted: the run was asked to stop. If it has a run folder, it has saved a checkpoint.
            CheckpointError: a checkpoint could not be saved.
            RapidformerError: the metrics could not be written. The run has saved a checkpoint.
            DeviceFailed: the device reported an error. The error names the step.
            ReplicasDiffer: workers have different values where all must have the same.
        """
        with (
            contextlib.closing(self.checkpoints) if self.checkpoints else contextlib.nullcontext(),
            step_errors.locate_device_errors(lambda: self.run.position.step, self._resume_hint()),
        ):
            return self._train(stop)

    def _train(self, stop: StopRequest) -> dict[str, float]:
        run, position = self.run, self.run.position
        metrics: dict[str, float] = {}
        result: StepResult | None = None
        batches = self._batches()
        run.notify("on_train_start")
        states_of(run.callbacks)  # fail now, not at the first checkpoint, if a state cannot be saved
        while (step := position.step) < self.total:
            self.profile.step_begins()

            # 1. Load the micro batches of this rank. The samples depend only on the seed and the step.
            run.watch.enter(watch.DATA, step + 1)
            with self.profile.part(DATA):
                microbatches = [next(batches) for _ in range(run.plan.sizes.accumulation)]

            # 2. Agree on what all ranks must know before the forward: the number of targets, whether to stop, and
            #    whether a background save has progressed on every rank. The hosts exchange this while the devices
            #    still compute the previous step.
            run.watch.enter(watch.EXCHANGE, step + 1)
            with self.profile.part(EXCHANGE):
                exchanged = run.exchange(
                    microbatches,
                    stop_requests=stop.is_requested,
                    save_requests=self.log.needs_save,  # it cannot write metrics, so the run saves while it can
                    stop_calls=run.stop_reason is not None,  # in a hook, after the previous step
                    saving=self.checkpoints is not None and self.checkpoints.is_writing,
                    logged=bool(run.logged),
                    minutes_due=self.intervals.due_by_clock() if run.workers.is_main else 0,
                )
            self._hooks_log |= exchanged["logged"] > 0
            if self.checkpoints and not exchanged["saving"]:
                self.checkpoints.proceed()
            if exchanged["stop_calls"]:  # the previous step was the last one
                return self._end_early(result, metrics)

            # 3. Forward, backward, clipping and update.
            # Receipts are recorded in the first step of this process. Later steps have no overhead.
            is_first = self.meter.steps == 0
            run.watch.enter(watch.STEP, step + 1)
            recording = self.receipts.watch(microbatches) if is_first else contextlib.nullcontext()
            with self.profile.part(TRAIN), recording:
                result = self._step(step, microbatches, exchanged["targets"])

            # 4. Update the counters.
            with self.profile.part(REST):
                self.receipts.count(microbatches)
                if is_first:
                    self.receipts.check()
                before, done = position.counts, step + 1
                self.meter.step(*position.advance(exchanged))
                position.stream = microbatches[-1].bookmark
                run.notify("on_step_end", done, result)
                self.log.progress.step_done(self._means)
            self.profile.step_ends()

            # 5. Log, evaluate, compare, save. In this order, the metrics of a step are written before its checkpoint.
            counts, minutes_due = (before, position.counts), int(exchanged["minutes_due"])
            if self.intervals.logs(done, self.total):
                self._log(result, step)
            if self.validation and self.intervals.due(EVALUATE, *counts, self.total, minutes_due):
                metrics = self._evaluate(self.validation)
                self._stop_if_patience_ended(result)
            self.stragglers.step_done(done)
            if self.log.trackers:
                self.log.trackers.flush()
            if self.intervals.epoch_ends(done):
                run.notify("on_epoch_end", done // self.intervals.steps_per_epoch)
            # The weights of the best step must be saved before the next step changes them.
            is_best = position.best is not None and position.best["step"] == done
            saves = (
                self.intervals.due(SAVE, *counts, self.total, minutes_due)
                or is_best
                or exchanged["stop_requests"] + exchanged["save_requests"] > 0
            )
            self._compare(saves=saves)
            if saves:
                self._save(is_last=exchanged["stop_requests"] > 0 or done == self.total)
            self._stop_if_requested(bool(exchanged["stop_requests"]), done)
        return metrics

    def _batches(self) -> Iterator[MicroBatch]:
        """Yield the micro batches of this rank, on its device, from the current position on."""
        run, sizes = self.run, self.run.plan.sizes
        requests = train_requests(
            run.order,
            run.position.step,
            self.total,
            rank=run.workers.data_rank,
            data_size=sizes.data,
            accumulation=sizes.accumulation,
        )
        assert run.data.train is not None
        batches = run.load(run.data.train, requests)
        if run.config.launch.min_workers is not None:
            batches = self._with_random_keys(batches)
        # The host counts targets before a batch moves to the device. The batches of the next step are copied while
        # this step is computed.
        return on_device(map(run.with_target_count, batches), run.workers.device, ahead=sizes.accumulation)

    def _with_random_keys(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Let the random numbers of each micro batch depend only on the seed, the step and its number in the step."""
        seed, rank, sizes = self.run.config.training.seed, self.run.workers.data_rank, self.run.plan.sizes
        first = self.run.position.step * sizes.accumulation
        for index, microbatch in enumerate(batches, first):
            step, turn = divmod(index, sizes.accumulation)
            microbatch.random_key = (seed, Stream.FORWARD, step, rank + turn * sizes.data)
            yield microbatch

    def _step(self, step: int, microbatches: list[MicroBatch], targets: float) -> StepResult:
        """Make an optimizer step, with the additional forwards and measurements of the task."""
        engine, task, workers = self.run.engine, self.run.task, self.run.workers
        samples = [sample for microbatch in microbatches for sample in microbatch.samples]
        with (
            self._locate_errors(step),
            step_errors.locate_index_errors(samples, "training samples"),
            step_errors.explain_parameters(self.run.plan),
        ):
            if task and task.measures:
                task.begin_step(microbatches)
            if task and task.needs_prepass:
                with evaluating(engine.model):
                    task.prepass(engine.eval_batch, microbatches, workers)
            result = engine.step(microbatches, targets).run(self.schedule(step))
        if task and task.measures:
            result.measured = {**result.measured, **task.measured(workers)}
        self._means.add({"loss": result.loss, **result.measured})
        if self._layer_grad_norms:
            result.measured = {**result.measured, **self._layer_grad_norms.measured()}
        return result

    # Log, evaluate, save.

    def _log(self, result: StepResult, step: int) -> None:
        clock = self.run.workers.clock
        clock.enter(phase_clock.EXCHANGE)  # the device may wait for other workers
        self._raise_pending_errors()
        clock.enter(LOGGING)
        means = self._means.take()
        line = {
            "step": step + 1,
            "epoch": self.epoch,
            **means,
            "grad_norm": float(result.grad_norm),
            **{name: float(value) for name, value in result.measured.items() if name not in means},
            "lr": self.run.peak_lr * self.schedule(step),
            "samples": self.run.position.samples,
            "tokens": self.run.position.tokens,
            **self.meter.window(),
            **self.stragglers.logged_values(),
            "skipped": bool(result.skipped),
        }
        line |= self._own_values(line)
        if self.intervals.shows(step + 1, self.total):
            self.log.progress.logged(line)
        self.log.record(line)

    def _own_values(self, line: MetricsLine) -> dict[str, float]:
        """Return the numbers that hooks of all workers have logged since the last line, as means.

        Raises:
            RapidformerError: the line has a number of this name already.
        """
        if not self._hooks_log:
            return {}
        own, self.run.logged = self.run.logged or {}, {}
        for name in own.keys() & line.keys():
            message = f"log() was given '{name}', which every line of metrics has already"
            raise RapidformerError(message, where="log(values)", hint="give it another name")
        finite = {name: [value for value in map(float, values) if math.isfinite(value)] for name, values in own.items()}
        found: dict[str, list[float]] = {}
        self.run.workers.clock.enter(phase_clock.EXCHANGE)
        shares = self.run.workers.gather(finite)
        self.run.workers.clock.enter(LOGGING)
        for share in shares:
            for name, values in share.items():
                found[name] = found.get(name, []) + values
        self._hooks_log = bool(found)
        return {name: fmean(values) if values else math.nan for name, values in found.items()}

    def _evaluate(self, validation: Validation) -> dict[str, float]:
        self._raise_pending_errors()
        with self.meter.paused():
            metrics = validation.evaluate()
        step = self._evaluated_step = self.run.position.step
        self.log.progress.tell(step, "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        self.log.record({"step": step, "epoch": self.epoch, **metrics})
        if self.best:
            self.best.update(metrics)
        self.run.notify("on_evaluate", step, metrics)
        return metrics

    def _compare(self, *, saves: bool) -> None:
        """Compare the values that several workers have, if the run saves this step or the comparison is due."""
        if self.replica_check is None:
            return
        interval = self.run.config.training.check_replicas
        if not saves and (interval is None or self.run.position.step % interval != 0):
            return
        self._raise_pending_errors()
        self.run.watch.enter(watch.CHECK, self.run.position.step)
        try:
            with self.meter.paused():
                self.replica_check.compare()
        except ReplicasDiffer as error:
            self._wait_for_save()
            error.hint = f"{error.hint}; {self._resume_hint()}"
            raise

    def _save(self, *, is_last: bool) -> None:
        self._saved_step = self.run.position.step
        if self.checkpoints:
            self._raise_pending_errors()
            self.run.watch.enter(watch.SAVE, self._saved_step)
            self.run.position.sums = self._means.read()
            self.checkpoints.save(is_last=is_last)

    def _wait_for_save(self, *, is_last: bool = False) -> None:
        if self.checkpoints:
            self.run.watch.enter(watch.SAVE, self.run.position.step)
            self.checkpoints.wait(is_last=is_last)

    @property
    def epoch(self) -> float:
        """Completed passes over the data. For a stream, a whole number."""
        stream = self.run.position.stream
        return round(stream["epoch"] if stream else self.run.order.epoch(self.run.position.step), 6)

    @property
    def exported_step(self) -> int:
        """Step of the weights that are evaluated and exported after the training: the best one, or the last one."""
        best = self.run.position.best
        return int(best["step"]) if best and self.run.folder else self.run.position.step

    # The ends of a run before its last step.

    def _stop_if_patience_ended(self, result: StepResult | None = None) -> None:
        """End the run at the current step if patience has run out. ``result`` is logged as that of the last step."""
        step, total, reason = self.run.position.step, self.total, self.best.patience_reason if self.best else None
        if not reason or step >= total:
            return
        self.total, self.early_stop_reason = step, f"after step {step} of {total}: {reason}"
        if result:
            say(self.run.workers, f"stopped early {self.early_stop_reason}")
            if not self.intervals.logs(step, total):
                self._log(result, step - 1)

    def _end_early(self, result: StepResult | None, metrics: dict[str, float]) -> dict[str, float]:
        """End the run at the current step because a hook called ``stop()``. Do what is due after the last step.

        Args:
            result: result of the last step. None if this process made none.
            metrics: metrics of the last evaluation.
        """
        step, total, workers = self.run.position.step, self.total, self.run.workers
        self.total = step
        reason = next(reason for reason in workers.gather(self.run.stop_reason) if reason is not None)
        self.early_stop_reason = f"after step {step} of {total}: {reason}"
        say(workers, f"stopped early {self.early_stop_reason}")
        if result is None:
            return metrics
        if not self.intervals.logs(step, total):
            self._log(result, step - 1)
        if self.validation and self._evaluated_step != step:
            metrics = self._evaluate(self.validation)
        self._wait_for_save()
        is_saved = self._saved_step == step
        if not is_saved or (self.checkpoints and (self.checkpoints.has_failed or self.checkpoints.lacks_best)):
            self._compare(saves=True)
            self._save(is_last=True)
        self._wait_for_save(is_last=True)
        self._raise_log_failure()
        return metrics

    def _stop_if_requested(self, is_requested: bool, done: int) -> None:
        """Wait for the last save. Raise :class:`Interrupted` if a stop was requested before the last step."""
        if is_requested or done == self.total:
            self._wait_for_save(is_last=True)
            self._raise_log_failure()
        if is_requested and done < self.total:
            hint, saved = self._resume_hint(), self.run.folder is not None
            raise Interrupted(f"stopped after step {done}, as requested", hint=hint, saved=saved)

    def _raise_log_failure(self) -> None:
        """Raise on all workers why the main worker could not write the metrics. The run has saved."""
        failure = self.log.failure
        reported = self.run.workers.broadcast((failure.message, failure.hint) if failure else None)
        if reported:
            message, to_do = reported
            step = self.run.position.step
            raise RapidformerError(message, where=f"after step {step}", hint=f"{to_do} and {self._resume_hint()}")

    def _raise_pending_errors(self) -> None:
        """Raise errors of earlier steps before anything about them is logged or saved."""
        with self._locate_errors(self.run.position.step - 1):
            self.run.engine.raise_pending_errors()

    def _locate_errors(self, newest: int) -> contextlib.AbstractContextManager[None]:
        """Add the step and its samples to a :class:`NonFiniteLoss`. ``newest`` is the last step that was started."""

        def samples(error: NonFiniteLoss, step: int) -> str:
            self._wait_for_save()
            where = step_errors.name_not_finite(error, self.run.workers)
            return where or f"training samples {step_errors.list_samples(self.run.order.step(step)[0].tolist())}"

        return step_errors.locate_non_finite(
            newest, f"check these samples; {step_errors.MAY_HELP}; {self._resume_hint()}", samples
        )

    def _resume_hint(self) -> str:
        return "continue with --resume" if self.run.folder else "nothing was saved: there is no --save"
