"""The course of a run, from its plan to its summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rapidformer_templates.data.checks import checked_data
from rapidformer_templates.data.order import Order
from rapidformer_templates.data.text.bad_lines import add_by_reason, describe_skipped
from rapidformer_templates.data.types import Endless, SampleSet
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.metrics import TEST
from rapidformer_templates.planning.task_choice import check_data_flags
from rapidformer_templates.planning.trackers import chosen_trackers
from rapidformer_templates.run import calls, out_of_memory
from rapidformer_templates.run.best import BestMetric, best_metric, check_metric
from rapidformer_templates.run.building import build_engine, choose_allocation, prepare_switches
from rapidformer_templates.run.callbacks import notify, restore_callbacks
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.checkpoint.check import problem_on_all_ranks
from rapidformer_templates.run.checkpoint.format import Reader, candidates, folder_of, is_checkpoint
from rapidformer_templates.run.configure import chosen_layout, resolve_plan
from rapidformer_templates.run.console import print_lines, say, show_plan, show_results, summarise
from rapidformer_templates.run.early_checks import check_folder
from rapidformer_templates.run.evaluation import Evaluator, Validation
from rapidformer_templates.run.export import describe_model, export_model
from rapidformer_templates.run.folder import MetricsFile, RunFolder, is_test_line, read_metrics
from rapidformer_templates.run.hooks import checked_schedule
from rapidformer_templates.run.intervals import EVALUATE, SAVE, Intervals, log_intervals
from rapidformer_templates.run.lock import lock_folder
from rapidformer_templates.run.loop import Loop, Position
from rapidformer_templates.run.meter import Meter
from rapidformer_templates.run.model_card import write_card
from rapidformer_templates.run.profiler import WARMUP, Profile
from rapidformer_templates.run.progress import Progress
from rapidformer_templates.run.push import check_push, create_repository, push_export
from rapidformer_templates.run.receipts import Receipts
from rapidformer_templates.run.reference import precomputed_reference
from rapidformer_templates.run.resume import restore_run, show_changes
from rapidformer_templates.run.sample_order import build_order, count_steps
from rapidformer_templates.run.trackers import RunName
from rapidformer_templates.run.tracking import Trackers
from rapidformer_templates.system import launch, program
from rapidformer_templates.system.files import writing
from rapidformer_templates.system.process_state import kept_process_state
from rapidformer_templates.system.signals import StopRequest, stop_request
from rapidformer_templates.system.terminal import ProgressBar
from rapidformer_templates.system.workers import Workers, join

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template


AfterTraining = Callable[[Engine, Workers], None]
"""Takes the trained engine and the workers. It is called while all workers are still connected."""


def fit(template: Template, then: AfterTraining | None = None) -> dict[str, Any]:
    """Check what can be checked, start local workers if requested, and train.

    Args:
        then: called after training if this process trains alone.
    """
    flags = dict(template.config.items())
    if launch.is_worker():
        return calls.in_this_worker(
            type(template).__qualname__, flags, template.override_flags, lambda: join_and_train(template)
        )
    if (template.config.launch.nproc_per_node or 1) == 1:
        return calls.noted(lambda: _train_here(template, then))
    return calls.noted(lambda: _train_in_new_workers(template, flags))


def _train_here(template: Template, then: AfterTraining | None) -> dict[str, Any]:
    with kept_process_state():
        return join_and_train(template, then)


def check_before_workers(template: Template) -> tuple[dict[str, str], Callable[[], bool]]:
    """Report errors that can be found before workers start, and show the plan.

    Returns:
        The environment variables for the workers, and a function that checks for a checkpoint to resume from.
    """
    _check_template(template)
    show_plan(template.plan)
    return chosen_layout(template.config), partial(_can_resume, template.config.training)


def _train_in_new_workers(template: Template, flags: Mapping[str, Any]) -> dict[str, Any]:
    config = template.config
    program.command()  # raises if there is no program that workers could run
    variables, resumes = check_before_workers(template)
    return calls.in_new_workers(
        type(template).__qualname__,
        flags,
        config.launch.nproc_per_node or 1,
        config.launch.master_port,
        variables,
        resumes,
    )


def _can_resume(training: TrainingFlags) -> bool:
    """Whether this run has a checkpoint to resume from. A run that will be overwritten does not count."""
    continues = training.resume or not training.overwrite
    return bool(continues and training.save and candidates(RunFolder(training.save).checkpoints))


def _check_template(template: Template) -> None:
    """Raise errors that can be found before a worker starts."""
    check_folder(template.config)
    if template.reads_task_data:
        task = template.task  # raises if the task is unknown
        check_data_flags(template.config)
        if not template.computes_own_metrics:
            check_metric(template.config)
        task.check()
    check_push(template.config)
    create_repository(template.config)
    prepare_switches(template)


def join_and_train(template: Template, then: AfterTraining | None = None) -> dict[str, Any]:
    """Train as one of several workers, or alone. ``then`` is called before the workers disconnect."""
    _check_worker_count(template.config)
    choose_allocation(template.plan)
    if launch.is_worker() and launch.CHECKED not in os.environ and template.reads_task_data:
        template.task.check()  # downloads what is missing before the workers connect: they wait only for minutes
    with (
        stop_request(partial(_can_resume, template.config.training), alone=not launch.is_worker()) as stop,
        join(template.plan.device, template.plan.sizes) as workers,
        out_of_memory.explained(template.config, template.plan, workers.rank, partial(resolve_plan, type(template))),
        _run_folder(template, workers) as folder,
    ):
        summary = train(template, folder, workers, stop, then)
    name = template.config.training.push_to_hub
    if name and folder and workers.is_main:
        print_lines(push_export(name, folder.export, summary["steps"]))
    return summary


def _check_worker_count(config: RunConfig) -> None:
    """Raise a :class:`ConfigError` if a launcher started a different number of workers than ``--nproc-per-node``."""
    requested, started = config.launch.nproc_per_node, os.environ.get("LOCAL_WORLD_SIZE")
    if launch.is_worker() and requested is not None and started is not None and int(started) != requested:
        raise ConfigError(
            f"the launcher has started {started} workers on this machine, not {requested}",
            where=f"--nproc-per-node ({config.origin('nproc_per_node')})",
            hint="leave the flag out: the launcher's own flag decides",
        )


@contextmanager
def _run_folder(template: Template, workers: Workers) -> Iterator[RunFolder | None]:
    """Lock the ``--save`` folder inside the context, so that no other run can write to it."""
    training = template.config.training
    folder = RunFolder(training.save) if training.save else None
    if workers.is_main and launch.CHECKED not in os.environ:
        _check_template(template)
        show_plan(template.plan)
    workers.barrier()
    if folder is None:
        yield None
        return
    with lock_folder(folder.path, workers) as has_locks:
        if not has_locks:
            say(
                workers,
                f"the file system of {folder.path} does not support locks: do not start a second run there",
                loud=True,
            )
        yield folder


def evaluate(template: Template, reference: Callable[[], nn.Module] | None = None) -> dict[str, float]:
    """Evaluate the template's model on its validation data without training. Call it on every worker.

    Args:
        reference: builds the reference model for preferences. None builds a model like the template's.

    Returns:
        The metrics that an evaluation writes to ``metrics.jsonl``, the same on every worker.

    Raises:
        DataError: there is no validation data.
    """
    config, plan = template.config, template.plan
    with (
        join(plan.device, plan.sizes) as workers,
        out_of_memory.explained(config, plan, workers.rank, partial(resolve_plan, type(template))),
    ):
        build_data(template, workers)
        engine = build_engine(template, workers, reference)
        if not template.data.validation_sets():
            hint = "name data with --data-dir and --data-name"
            raise DataError("there is no validation part to evaluate on", where="--data-name", hint=hint)
        validation = Validation(template, engine, workers)
        with ProgressBar("evaluating", validation.share, show=workers.is_main) as bar:
            return validation.evaluate(lambda count: bar.advance(count, lambda: ""))


def train(
    template: Template, folder: RunFolder | None, workers: Workers, stop: StopRequest, then: AfterTraining | None = None
) -> dict[str, Any]:
    """Train on this worker: data, model, start position, loop, export.

    Nothing is written to the run folder until everything that can fail early has been tried.
    """
    # 1. Data first, then the model: a classifier must know its labels.
    samples = build_data(template, workers)
    metric = best_metric(template)
    engine = build_engine(template, workers)

    precomputed = precomputed_reference(template, engine, workers)

    # 2. The start position: step 0, or the step of the checkpoint that the run resumes from.
    continues = _can_resume(template.config.training)
    order = build_order(template, samples, workers)
    position = restore_run(template, engine, folder, order, workers)
    if isinstance(samples, Endless) and position.stream is not None:
        samples.go_to(position.stream)
    if position.step:
        restore_callbacks(template.callbacks, position.callbacks, workers)

    # 3. The training loop.
    if folder and template.config.training.resume:
        show_changes(folder, template.plan.values, workers)
    if folder and workers.is_main:
        folder.prepare(template.plan.to_json(), overwrite=template.config.training.overwrite)
        with writing(folder.model):
            describe_model(engine.model, template, folder.model)
    workers.barrier()
    if precomputed:
        saved = folder if continues else _loaded_run(template.config.training) if position.step else None
        precomputed.attach(folder, saved=saved)
    loop = _build_loop(template, engine, order, position, folder, metric, workers)
    if position.step >= loop.total:
        reason = f" (stopped early {loop.early_stop_reason})" if loop.early_stop_reason else ""
        say(workers, f"nothing is left to train: {position.step:,} of {loop.total:,} steps are done{reason}")
    with closing(loop.trackers) if loop.trackers else nullcontext():
        with stop.loop(saves=folder is not None), Progress(loop.total, position.step, show=workers.is_main) as progress:
            metrics = loop.run(stop, progress)

        # 4. Best weights, test metrics, export, summary.
        summary = _finish(loop, metrics, workers)
        if then:
            then(engine, workers)
        return summary


def _loaded_run(training: TrainingFlags) -> RunFolder:
    """The run folder that ``--load`` refers to, either directly or through one of its checkpoints."""
    path = Path(str(training.load))
    return RunFolder(path.parent.parent if is_checkpoint(path) else path)


def build_data(template: Template, workers: Workers) -> SampleSet | Endless:
    """Return the training samples. All data is stored on the template for its hooks."""
    template.data = checked_data(template.build_data())
    skipped = template.task.bad.skipped if template.uses_task else []
    if skipped:
        say(workers, describe_skipped(add_by_reason({}, skipped)), loud=True)
    for note in template.task.notes if template.uses_task else []:
        say(workers, f"note       {note}")
    samples = template.data.train
    if isinstance(samples, Endless) and template.data.valid is None:
        say(workers, "note       a stream is not divided: without a validation part the run is not evaluated")
    if samples is None or (not isinstance(samples, Endless) and len(samples) == 0):
        raise DataError("the training data set is empty", where="build_data()", hint="it must have at least one sample")
    if template.config.data.evaluate_test and not template.data.test:
        hint = "return Data(…, test=samples), or leave the flag out"
        raise DataError("there is no test part", where="--evaluate-test", hint=hint)
    return samples


def _build_loop(
    template: Template,
    engine: Engine,
    order: Order,
    position: Position,
    folder: RunFolder | None,
    metric: BestMetric | None,
    workers: Workers,
) -> Loop:
    training = template.config.training
    total = count_steps(template, order, workers)
    metrics = MetricsFile(folder.metrics, position.step) if folder and workers.is_main else None
    if metrics and metrics.garbled:
        numbers = ", ".join(map(str, metrics.garbled[:8])) + (" …" if len(metrics.garbled) > 8 else "")
        say(workers, f"left out lines of metrics.jsonl that cannot be read: {numbers}", loud=True)
    log, show = log_intervals(total, training.log_interval)
    trackers = _open_trackers(template, folder, workers)  # trackers start before the run's clock does
    return Loop(
        template=template,
        engine=engine,
        order=order,
        validation=Validation(template, engine, workers) if template.data.validation_sets() else None,
        schedule=checked_schedule(template.build_scheduler(total)),
        position=position,
        total=total,
        intervals=Intervals(
            log=log,
            show=show,
            steps_per_epoch=order.steps_per_epoch,
            counts_epochs=not {"epochs", "train_iters"}.isdisjoint(training.in_epochs),
            every={n: i for n, i in ((EVALUATE, training.eval_interval), (SAVE, training.save_interval)) if i},
        ),
        workers=workers,
        folder=folder,
        metrics=metrics,
        meter=Meter(workers.device),
        receipts=Receipts(engine, template, order),
        keep_checkpoints=training.keep_checkpoints,
        metric=metric,
        patience=training.early_stopping_patience,
        saver=AsyncSaver(folder.checkpoints, workers, training.keep_checkpoints)
        if folder and training.async_save
        else None,
        profile=_profile(template, folder, total - position.step, workers),
        trackers=trackers,
    )


def _open_trackers(template: Template, folder: RunFolder | None, workers: Workers) -> Trackers | None:
    """The trackers, on the main worker only. None if there are none."""
    training = template.config.training
    names = chosen_trackers(training.report_to, installed_packages()) if training.report_to else ()
    if not names or folder is None or not workers.is_main:
        return None
    run_name = RunName(training.run_name or folder.path.resolve().name, training.project_name)
    return Trackers(folder, names, run_name, template.config, template.plan, workers)


def _profile(template: Template, folder: RunFolder | None, steps_left: int, workers: Workers) -> Profile | None:
    """The profiler, on the main worker only. None if it is off or the resumed run has no steps left.

    Raises:
        ConfigError: the run has too few steps.
    """
    steps = template.config.training.profile
    if not steps or not steps_left or folder is None:
        return None
    if steps_left < WARMUP + steps:
        raise ConfigError(
            f"--profile {steps} needs {WARMUP + steps} steps, this run has {steps_left}",
            where=template.config.origin("profile"),
            hint=f"the first {WARMUP} are a warm-up; train for more steps, or record fewer of them",
        )
    return Profile(folder.profile, steps, workers.device) if workers.is_main else None


def _finish(loop: Loop, metrics: dict[str, float], workers: Workers) -> dict[str, Any]:
    template, folder = loop.template, loop.folder
    if loop.position.stream and loop.position.stream.get("reasons"):
        say(workers, f"the stream {describe_skipped(loop.position.stream['reasons'])}", loud=True)
    if _load_best_weights(loop, workers):
        metrics = {}
    if loop.validation and not metrics:  # the best weights replaced the last ones, or the run was already complete
        metrics = loop.validation.evaluate()
    if template.config.data.evaluate_test:
        metrics |= _evaluate_test(loop)
    if folder and template.config.training.export_model:
        export_model(loop.engine, template, folder.export, workers)
    receipts = loop.receipts.measured_by_rank() if loop.meter.steps else {}
    summary = summarise(template, loop, metrics, receipts, workers)
    if workers.is_main:
        show_results(folder, summary)
    if workers.is_main and folder and template.config.training.push_to_hub:
        write_card(template.config, template.plan, summary, folder.export)
    workers.barrier()
    notify(template, "on_train_end", summary)
    return summary


def _evaluate_test(loop: Loop) -> dict[str, float]:
    """Metrics of the exported weights on the test set. They are recorded once, even if the run is completed twice."""
    step, folder = loop.exported_step, loop.folder
    metrics = Evaluator(loop.template, loop.engine, loop.template.data.test, loop.workers, name=TEST).evaluate()
    if loop.metrics and folder:
        written = any(is_test_line(line) and line["step"] == step for line in read_metrics(folder.metrics))
        if not written:
            loop.record({"step": step, **metrics})
    return metrics


def _load_best_weights(loop: Loop, workers: Workers) -> bool:
    """Load the best weights. Returns False if the last weights are the best, or if the best checkpoint is lost."""
    best, folder = loop.position.best, loop.folder
    if best is None or folder is None or best["step"] == loop.position.step:
        return False
    checkpoint = folder_of(folder.checkpoints, best["step"])
    problem = problem_on_all_ranks(checkpoint, workers)
    if problem:
        say(
            workers,
            f"the best checkpoint is lost ({checkpoint.name}: {problem}): the last weights are used instead",
            loud=True,
        )
        loop.position.best = None
        return False
    averages = loop.template.config.training.ema_decay is not None  # the averages are part of the optimizer state
    loop.engine.load(Reader(checkpoint), optimizer=averages)
    return True
