"""A run from its plan to its summary. :func:`train` reads as the order of composition."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rapidformer_templates import launch
from rapidformer_templates.checkpoint import Reader, folder_of
from rapidformer_templates.data.loader import sample_lengths
from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.evaluation import Evaluator
from rapidformer_templates.export import export_model
from rapidformer_templates.layout import find_layout
from rapidformer_templates.loop import Intervals, Loop
from rapidformer_templates.meter import Meter
from rapidformer_templates.progress import Progress
from rapidformer_templates.random_state import seed_all
from rapidformer_templates.receipts import Receipts
from rapidformer_templates.report import say, show_plan, show_results, summarise
from rapidformer_templates.resume import take_up
from rapidformer_templates.run_folder import MetricsFile, RunFolder
from rapidformer_templates.signals import stop_request
from rapidformer_templates.switches import REGISTRY
from rapidformer_templates.workers import Workers, join

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer


def fit(template: Trainer) -> dict[str, Any]:
    """Check what can be checked, start local workers if they are asked for, and train."""
    config, plan = template.config, template.plan
    folder = RunFolder(config.training.save) if config.training.save else None
    count = config.launch.nproc_per_node or 1
    if launch.is_worker() or count == 1:
        return (
            launch.report_errors(lambda: _join_and_train(template)) if launch.is_worker() else _join_and_train(template)
        )
    _check(template, folder)
    show_plan(plan)
    launch.run_workers(launch.this_command(), count, config.launch.master_port)
    return folder.read_summary() if folder else {}


def _check(template: Trainer, folder: RunFolder | None) -> None:
    """What can be seen to be wrong before a worker starts."""
    training = template.config.training
    if training.resume and folder is None:
        raise ConfigError("--resume needs --save, the run folder to go on in", where=template.config.origin("resume"))
    if folder:
        folder.check(resume=training.resume, overwrite=training.overwrite)
    if template.reads_task_data:
        template.task.check()


def _join_and_train(template: Trainer) -> dict[str, Any]:
    with stop_request() as stop, join(template.plan.device) as workers:
        return train(template, workers, stop)


def train(template: Trainer, workers: Workers, stop: Any) -> dict[str, Any]:
    """One worker's run."""
    config, plan = template.config, template.plan
    training = config.training

    # 1. The run folder. Our own launcher has looked at it and shown the plan before it started workers.
    folder = RunFolder(training.save) if training.save else None
    started_alone = config.launch.nproc_per_node in (None, 1)
    if workers.is_main and started_alone:
        _check(template, folder)
        show_plan(plan)
    workers.barrier()
    if folder and workers.is_main:
        folder.prepare(plan.to_json(), overwrite=training.overwrite and not training.resume)
    workers.barrier()

    # 2. The data, then the model: a classifier must know its labels.
    template.data = data = template.build_data()
    samples = data.train
    skipped = template.task.skipped if template.uses_task else []
    if skipped:
        say(workers, f"left out {len(skipped)} lines that cannot be read: {'; '.join(skipped[:5])}", loud=True)
    if samples is None or len(samples) == 0:
        raise DataError("the training data set is empty", where="build_data()", hint="it must have at least one sample")
    engine = _engine(plan.engine)(plan, workers, clip_grad=training.clip_grad)
    seed_all(training.seed)
    with engine.build_context():
        model = template.build_model()
    template.model_was_built(model)

    # 3. Switches that change the model, in the order of their stages; the engine comes last.
    layout = find_layout(model)
    for switch in (REGISTRY[name] for name in plan.switches):
        if switch.transform:
            model = _load(switch.transform)(model, layout, config.switches.get(switch.name))
    recipe = template.build_optimizer()
    template.peak_lr = float(recipe.kwargs.get("lr", 0.0))
    engine.setup(model, recipe, template.compute_loss)
    template.model = engine.model

    # 4. Order, schedule, position; a resumed run takes them from its checkpoint.
    order = _order(template, samples)
    total = training.train_iters or order.steps_per_epoch * (training.epochs or 1)
    position = take_up(template, engine, folder, order, workers)

    # 5. The loop.
    metrics_file = MetricsFile(folder.metrics, position.step) if folder and workers.is_main else None
    valid = data.valid if data.valid is not None and len(data.valid) else None
    evaluator = Evaluator(template, engine, valid, workers, training.eval_iters) if valid is not None else None
    epoch = order.steps_per_epoch if order.by_epochs else 0
    loop = Loop(
        template=template,
        engine=engine,
        order=order,
        train=samples,
        evaluator=evaluator,
        schedule=template.build_scheduler(total),
        position=position,
        total=total,
        intervals=Intervals(
            log=training.log_interval,
            evaluate=training.eval_interval or epoch,
            save=training.save_interval or epoch,
            epoch=epoch,
        ),
        workers=workers,
        folder=folder,
        metrics=metrics_file,
        meter=Meter(workers.device),
        receipts=Receipts(engine, [name for s in plan.switches for name in REGISTRY[s].receipt]),
        keep=training.keep_checkpoints,
        metric=_best_metric(template, evaluator),
    )
    with stop.loop(), Progress(total, position.step, show=workers.is_main) as progress:
        metrics = loop.run(stop, progress)

    # 6. Export, summary, report.
    metrics = _take_best(loop, metrics)
    receipts = loop.receipts.measured() if loop.meter.steps else {}
    if folder and training.export_model:
        export_model(engine, model, template, folder.export, workers)
    summary = summarise(template, loop, metrics, receipts, workers)
    if workers.is_main:
        show_results(folder, summary)
    workers.barrier()
    template.on_train_end(summary)
    return summary


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _engine(path: str) -> type[Any]:
    engine: type[Any] = _load(path)
    return engine


def _order(template: Trainer, samples: Any) -> SampleOrder:
    training, group = template.config.training, template.config.data.group_by_length
    group = training.fine_tunes if group is None else group
    return SampleOrder(
        len(samples),
        template.plan.sizes.global_batch,
        training.seed,
        by_epochs=training.epochs is not None,
        lengths=sample_lengths(samples, template.data, training=True) if group else None,
    )


def _best_metric(template: Trainer, evaluator: Evaluator | None) -> tuple[str, bool] | None:
    """(name, whether greater is better) of the metric by which the best checkpoint is kept."""
    training = template.config.training
    keep = training.fine_tunes if training.keep_best is None else training.keep_best
    if evaluator is None or not keep:
        return None
    if training.metric_for_best:
        return (
            training.metric_for_best,
            "loss" not in training.metric_for_best and training.metric_for_best != "perplexity",
        )
    if not template.uses_task:
        return "eval_loss", False
    return template.task.best_metric, template.task.greater_is_better


def _take_best(loop: Loop, metrics: dict[str, float]) -> dict[str, float]:
    """Put the best weights back where they are not the last ones; their metrics."""
    best = loop.position.best
    if not best or not loop.folder or best["step"] == loop.total:
        return metrics
    loop.engine.load(Reader(folder_of(loop.folder.checkpoints, best["step"])), optimizer=False)
    assert loop.evaluator is not None
    return loop.evaluator.evaluate()
