"""The course of a run, from its plan to its summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from torch import nn

from rapidformer_templates.data.text.bad_lines import describe_skipped
from rapidformer_templates.data.types import Endless
from rapidformer_templates.errors import ConfigError, DataError, Interrupted, counted
from rapidformer_templates.models.model_files import check_not_quantized
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.data_rules import check_data_flags
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.run import out_of_memory, scripts
from rapidformer_templates.run.building import build_data, build_engine, choose_allocation, prepare_switches
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.configure import chosen_layout, resolve_plan
from rapidformer_templates.run.console import show_plan, show_results, summarise
from rapidformer_templates.run.early_checks import check_folder, check_metric
from rapidformer_templates.run.export import ExportedWeights, describe_model, export_model
from rapidformer_templates.run.folder import RunFolder, Summary, is_test_line, lock_folder, read_metrics
from rapidformer_templates.run.hooks import restore_callbacks
from rapidformer_templates.run.inference import Evaluator, Validation
from rapidformer_templates.run.loop import Loop
from rapidformer_templates.run.mirror import mirrored
from rapidformer_templates.run.new_workers import Flags, Keep, run_with_restarts, train_sent, worker_numbers
from rapidformer_templates.run.push_to_hub import check_push, create_repository, push_export, write_card
from rapidformer_templates.run.reference import precomputed_reference
from rapidformer_templates.run.run import Run, Template, begin_run
from rapidformer_templates.run.saving import load_exported, restore_run, show_changes
from rapidformer_templates.run.steps import best_metric, build_order
from rapidformer_templates.run.watch import EXPORT
from rapidformer_templates.system import launch
from rapidformer_templates.system.files import writing
from rapidformer_templates.system.process_state import kept_process_state
from rapidformer_templates.system.processes import LAUNCHER, StopRequest, handle_stop_signals
from rapidformer_templates.system.terminal import ProgressBar, print_lines, say
from rapidformer_templates.system.workers import Workers, join

AfterTraining = Callable[[Run], None]
"""Takes the trained run, also if it was stopped or has failed. It is called while all workers are still connected."""


def fit(template: Template, then: AfterTraining | None = None, keep: Keep | None = None) -> Summary:
    """Train in this process, in new workers, or as one of them.

    Args:
        then: called after training if this process trains alone, also if the training ends with an error.
        keep: takes the weights of new workers, to which the template is sent. Without it they run the script again.
    """
    if launch.is_worker():
        name, flags = type(template).__qualname__, dict(template.config.items())
        return scripts.train_in_this_worker(name, flags, template.override_flags, lambda: join_and_train(template))
    if (template.config.launch.nproc_per_node or 1) > 1:
        return scripts.record_outcome(lambda: _train_in_workers(template, keep))
    with kept_process_state():
        return scripts.record_outcome(lambda: join_and_train(template, then))


def _train_in_workers(template: Template, keep: Keep | None) -> Summary:
    """Report errors that can be found before workers start, show the plan, and train in new workers."""
    if keep is None:
        launch.program_command()  # raises if there is no program that workers could run
    _check_template(template)
    show_plan(template.plan)
    name, config, resumes = type(template).__qualname__, template.config, partial(_can_resume, template.config.training)
    port, variables = config.launch.master_port, chosen_layout(config)

    def attempt(count: int, changed: Flags) -> Summary:
        if keep is not None:
            return train_sent(template, changed, keep, count, port, variables, resumes)
        return scripts.train_in_new_workers(name, {**dict(config.items()), **changed}, count, port, variables, resumes)

    return run_with_restarts(template, attempt)


def _check_template(template: Template) -> None:
    """Raise errors that can be found before a worker starts."""
    check_folder(template.config)
    own = scripts.overridden_hooks(type(template))
    if template.reads_task_data:
        task = template.task  # raises if the task is unknown
        check_data_flags(template.config)
        if not template.computes_own_metrics:
            check_metric(template.config, own_loss="compute_loss" in own)
        task.check()
    if "build_model" not in own:
        check_not_quantized(template.config)
    check_push(template.config)
    if template.config.training.push_to_hub:
        create_repository(template.config.training.push_to_hub)
    prepare_switches(template.config, template.plan)
    if note := worker_numbers(template)[1]:
        print_lines(note)


def _can_resume(training: TrainingFlags) -> bool:
    """Whether this run has a checkpoint to resume from. A run that will be overwritten does not count."""
    continues = training.resume or not training.overwrite
    return bool(continues and training.save and checkpoint.candidates(RunFolder(training.save).checkpoints))


def join_and_train(template: Template, then: AfterTraining | None = None) -> Summary:
    """Train as one of several workers, or alone. ``then`` is called before the workers disconnect."""
    config = template.config
    if launch.is_worker():
        # Refuse flags that the launcher has decided otherwise.
        requested, started = config.launch.nproc_per_node, os.environ.get("LOCAL_WORLD_SIZE")
        if requested is not None and started is not None and int(started) != requested:
            message = f"the launcher has started {counted(int(started), 'worker')} on this machine, not {requested}"
            hint = "leave the flag out: the launcher's own flag decides"
            raise ConfigError(message, where=f"--nproc-per-node ({config.origin('nproc_per_node')})", hint=hint)
        if "max_restarts" in config.origins and LAUNCHER not in os.environ:
            message = "another launcher has started the workers, and only it can restart them"
            hint = "give the flag to the launcher: torchrun --max-restarts N SCRIPT …"
            raise ConfigError(message, where=f"--max-restarts ({config.origin('max_restarts')})", hint=hint)
    plan = template.plan
    choose_allocation(plan)
    if launch.is_worker() and launch.CHECKED not in os.environ and template.reads_task_data:
        template.task.check()  # downloads what is missing before the workers connect: they wait only for minutes
    with (
        handle_stop_signals(StopRequest(partial(_can_resume, config.training), alone=not launch.is_worker())) as stop,
        join(plan.device, plan.sizes) as workers,
        out_of_memory.explained(config, plan, workers.rank, partial(resolve_plan, type(template))),
        _run_folder(template, workers) as folder,
    ):
        run = begin_run(template, workers, folder)

        def resume_hint() -> str:
            saved = checkpoint.candidates(folder.checkpoints) if folder else []
            return f"--resume continues from {saved[0].name}" if saved else "there is no checkpoint to resume from"

        stacks = folder.stacks if folder else None
        with run.watch.running(workers, config.launch.worker_timeout, stacks, resume_hint):
            summary = train(run, stop, then)
    name = config.training.push_to_hub
    if name and folder and workers.is_main:
        print_lines(push_export(name, folder.export, summary["steps"]))
    return summary


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
            line = f"the file system of {folder.path} does not support locks: do not start a second run there"
            say(workers, line, loud=True)
        with mirrored(training, folder, workers):
            yield folder


def evaluate(
    template: Template,
    reference: Callable[[], nn.Module] | None = None,
    *,
    test: bool = False,
    limit: int | None = None,
    weights: ExportedWeights | None = None,
) -> dict[str, float]:
    """Evaluate the template's model on its validation data without training. Call it on every worker.

    Args:
        reference: builds the reference model for preferences. None builds a model like the template's.
        test: evaluate the test part instead.
        limit: number of samples of each validation set. None means all.
        weights: the weights of the model. None keeps those of ``build_model``.

    Returns:
        The metrics that an evaluation writes to ``metrics.jsonl``, the same on every worker.

    Raises:
        DataError: there is no such data.
    """
    config, plan = template.config, template.plan
    with (
        join(plan.device, plan.sizes) as workers,
        out_of_memory.explained(config, plan, workers.rank, partial(resolve_plan, type(template))),
    ):
        run = begin_run(template, workers, trains=False)
        build_data(run)
        build_engine(run, reference)
        if weights:
            load_exported(run, weights)
        validation = Validation(run, test=test, limit=limit)
        if not validation.evaluators:
            name, hint = "test" if test else "validation", "name data with --data-dir and --data-name"
            raise DataError(f"there is no {name} part to evaluate on", where="--data-name", hint=hint)
        with ProgressBar("evaluating", validation.share, show=workers.is_main) as bar:
            return validation.evaluate(lambda count: bar.advance(count, lambda: ""))


def train(run: Run, stop: StopRequest, then: AfterTraining | None = None) -> Summary:
    """Train on this worker: data, model, start position, loop, export. Returns the summary."""
    training, workers, folder = run.config.training, run.workers, run.folder

    # 1. Data first, then the model: a classifier must know its labels.
    samples = build_data(run)
    metric = best_metric(run)
    build_engine(run)
    precomputed = precomputed_reference(run)

    # 2. The start position: step 0, or the step of the checkpoint that the run resumes from.
    continues = _can_resume(training)
    run.order = build_order(run, samples)
    run.position = restore_run(run)
    if isinstance(samples, Endless) and run.position.stream is not None:
        samples.go_to(run.position.stream)
    if run.position.step:
        restore_callbacks(run.callbacks, run.position.callbacks, workers)

    # 3. The run folder. Nothing is written to it until everything that can fail early has been tried.
    defaults = {spelling(name): value for name, value in run.config.items() if name not in run.config.origins}
    plan = {**run.plan.to_json(), "defaults": defaults}
    if folder and training.resume:
        show_changes(folder, plan, workers)
    if folder and workers.is_main:
        folder.prepare(plan, overwrite=training.overwrite)
        with writing(folder.model):
            describe_model(run, folder.model)
    workers.barrier()
    if precomputed:
        saved = folder if continues else None
        if not continues and run.position.step:  # the run that --load refers to, directly or through its checkpoint
            path = Path(str(training.load))
            saved = RunFolder(path.parent.parent if checkpoint.is_checkpoint(path) else path)
        precomputed.attach(folder, saved=saved)

    # 4. The training loop.
    loop = Loop(run, metric)
    if run.position.step >= loop.total:
        reason = f" (stopped early {loop.early_stop_reason})" if loop.early_stop_reason else ""
        say(workers, f"nothing is left to train: {run.position.step:,} of {loop.total:,} steps are done{reason}")
    with closing(loop.log):
        with stop.loop(saves=folder is not None), loop.log.progress, _called_on_error(then, run, Interrupted):
            metrics = loop.train(stop)

        # 5. Best weights, test metrics, export, summary.
        with _called_on_error(then, run):
            summary = _finish(loop, metrics)
        if then:
            then(run)
        return summary


@contextmanager
def _called_on_error(then: AfterTraining | None, run: Run, *agreed: type[BaseException]) -> Iterator[None]:
    """Call ``then`` if the code inside fails: its model has the weights of the last step.

    Args:
        agreed: errors that all workers raise together. After another one, only a single worker has whole weights.
    """
    try:
        yield
    except (Exception, Interrupted) as error:
        if then and (run.workers.world == 1 or isinstance(error, agreed)):
            run.watch.enter(EXPORT, run.position.step)
            try:
                then(run)
            except Exception as other:  # such as that of a device that has failed
                error.add_note(f"The weights of the last step are lost: {other}")
        raise


def _finish(loop: Loop, metrics: dict[str, float]) -> Summary:
    """Evaluate and export the weights that the run keeps, and return its summary."""
    run, folder, training = loop.run, loop.run.folder, loop.run.config.training
    if run.position.stream and run.position.stream.get("reasons"):
        say(run.workers, f"the stream {describe_skipped(run.position.stream['reasons'])}", loud=True)
    if _load_best_weights(run):
        metrics = {}
    if loop.validation and not metrics:  # the best weights replaced the last ones, or the run was already complete
        metrics = loop.validation.evaluate()
    if run.config.data.evaluate_test:
        samples, step = run.data.test, loop.exported_step
        assert samples is not None, "build_data checks that there is a test part"
        test_metrics = Evaluator(run, samples, name=TEST).evaluate()
        metrics |= test_metrics
        # They are recorded once, even if the run is completed twice.
        lines = read_metrics(folder.metrics) if folder and loop.log.metrics else None
        if lines is not None and not any(is_test_line(line) and line["step"] == step for line in lines):
            loop.log.record({"step": step, **test_metrics})
            if loop.log.failure:
                raise loop.log.failure
    run.watch.enter(EXPORT, run.position.step)
    if folder and training.export_model:
        trained = (run.position.step, loop.epoch)
        card = partial(write_card, run.config, run.plan, metrics=metrics, trained=trained)
        export_model(run.engine, run.hooks.tokenizer, folder.export, card)
    receipts = loop.receipts.measured_by_rank() if loop.meter.steps else {}
    summary = summarise(loop, metrics, receipts)
    if run.workers.is_main:
        show_results(folder, summary)
    run.workers.barrier()
    run.notify("on_train_end", summary)
    return summary


def _load_best_weights(run: Run) -> bool:
    """Load the best weights. Returns False if the last weights are the best, or if the best checkpoint is lost."""
    best, folder = run.position.best, run.folder
    if best is None or folder is None or best["step"] == run.position.step:
        return False
    saved = checkpoint.folder_of(folder.checkpoints, best["step"])
    problem = checkpoint.problem_on_all_ranks(saved, run.workers)
    if problem:
        line = f"the best checkpoint is lost ({saved.name}: {problem}): the last weights are used instead"
        say(run.workers, line, loud=True)
        run.position.best = None
        return False
    averages = run.config.training.ema_decay is not None  # the averages are part of the optimizer state
    run.engine.load(checkpoint.Reader(saved), optimizer=averages)
    return True
