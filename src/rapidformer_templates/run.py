"""A run from its plan to its summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from rapidformer_templates import ladder, launch
from rapidformer_templates.async_save import AsyncSaver
from rapidformer_templates.checkpoint import Reader, folder_of
from rapidformer_templates.configure import chosen_layout, resolve_plan
from rapidformer_templates.data.loader import load
from rapidformer_templates.data.order import Order, Request
from rapidformer_templates.data.task_flags import check_data_flags
from rapidformer_templates.deepspeed_parts import prepare
from rapidformer_templates.engines.base import Engine
from rapidformer_templates.engines.building import Building
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.evaluation import Evaluator
from rapidformer_templates.export import export_model
from rapidformer_templates.host_memory import give_freed_memory_back, keep_freed_memory
from rapidformer_templates.layout import find_layout
from rapidformer_templates.loop import Intervals, Loop, Position
from rapidformer_templates.meter import Meter
from rapidformer_templates.ordering import build_order
from rapidformer_templates.profile import WARMUP, Profile
from rapidformer_templates.progress import Progress
from rapidformer_templates.random_state import seed_all
from rapidformer_templates.receipts import Receipts
from rapidformer_templates.report import say, show_plan, show_results, summarise
from rapidformer_templates.resume import take_up
from rapidformer_templates.run_folder import MetricsFile, RunFolder
from rapidformer_templates.signals import StopRequest, stop_request
from rapidformer_templates.switches import REGISTRY
from rapidformer_templates.workers import Workers, join

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer


def fit(template: Trainer) -> dict[str, Any]:
    """Check what can be checked, start local workers if they are asked for, and train."""
    config, plan = template.config, template.plan
    folder = RunFolder(config.training.save) if config.training.save else None
    count = config.launch.nproc_per_node or 1
    if launch.is_worker():
        return launch.report_errors(lambda: _join_and_train(template))
    if count == 1:
        return _join_and_train(template)
    _check(template, folder)
    show_plan(plan)
    launch.run_workers(launch.this_command(), count, config.launch.master_port, chosen_layout(config))
    return folder.read_summary() if folder else {}


def _check(template: Trainer, folder: RunFolder | None) -> None:
    """What can be seen to be wrong before a worker starts."""
    training = template.config.training
    if training.resume and folder is None:
        raise ConfigError("--resume needs --save, the run folder to go on in", where=template.config.origin("resume"))
    if training.profile and folder is None:
        raise ConfigError(
            "--profile needs --save, the run folder that it writes to", where=template.config.origin("profile")
        )
    if folder:
        folder.check(resume=training.resume, overwrite=training.overwrite)
    if template.reads_task_data:
        task = template.task  # an unknown one is refused first
        check_data_flags(template.config)
        task.check()
    prepare(template.plan)


def _join_and_train(template: Trainer) -> dict[str, Any]:
    if template.plan.device == "cpu":
        _choose_allocation({REGISTRY[name].family for name in template.plan.switches})
    with (
        stop_request() as stop,
        join(template.plan.device, template.plan.sizes) as workers,
        ladder.explained(template.config, template.plan, workers.rank, partial(resolve_plan, type(template))),
    ):
        return train(template, workers, stop)


def _choose_allocation(families: set[str | None]) -> None:
    """Fast where memory is no matter, small where it is the point, and the system's own way between the two."""
    if "offload" in families:
        give_freed_memory_back()
    elif "partitioning" not in families:
        keep_freed_memory()


def train(template: Trainer, workers: Workers, stop: StopRequest) -> dict[str, Any]:
    """One worker's run: reads as the order of composition."""
    # 1. Whether the run folder may be written to. Nothing is written before all that can go wrong has been tried.
    folder = _check_folder(template, workers)

    # 2. The data, then the model: a classifier must know its labels.
    samples = _build_data(template, workers)
    engine = _build_engine(template, workers)

    # 3. Where the run starts: at the beginning, or where its checkpoint left it.
    order = build_order(template, samples, workers)
    position = take_up(template, engine, folder, order, workers)

    # 4. The loop.
    if folder and workers.is_main:
        folder.prepare(template.plan.to_json(), overwrite=template.config.training.overwrite and not position.step)
    workers.barrier()
    loop = _build_loop(template, engine, order, position, folder, workers)
    with stop.loop(), Progress(loop.total, position.step, show=workers.is_main) as progress:
        metrics = loop.run(stop, progress)

    # 5. Best weights, export, summary.
    return _finish(loop, metrics, workers)


def _check_folder(template: Trainer, workers: Workers) -> RunFolder | None:
    training = template.config.training
    folder = RunFolder(training.save) if training.save else None
    if workers.is_main and launch.CHECKED not in os.environ:
        _check(template, folder)
        show_plan(template.plan)
    workers.barrier()
    return folder


def _build_data(template: Trainer, workers: Workers) -> Sequence[Any]:
    """The training samples; the whole data are kept in the template for its hooks."""
    template.data = template.build_data()
    skipped = template.task.skipped if template.uses_task else []
    if skipped:
        say(workers, f"left out {len(skipped)} lines that cannot be read: {'; '.join(skipped[:5])}", loud=True)
    for note in template.task.notes if template.uses_task else []:
        say(workers, f"note       {note}")
    samples = template.data.train
    if samples is None or len(samples) == 0:
        raise DataError("the training data set is empty", where="build_data()", hint="it must have at least one sample")
    return samples


def _build_engine(template: Trainer, workers: Workers) -> Engine:
    """The model, changed by the active switches in the order of their stages; the engine comes last."""
    config, plan = template.config, template.plan
    engine: Engine = load_object(plan.engine)(plan, workers, clip_grad=config.training.clip_grad)
    seed_all(config.training.seed)
    with engine.build_context():
        model = template.build_model()
    template.model_was_built(model)
    if template.uses_task:
        template.task.check_model(model)
    for switch in (REGISTRY[name] for name in plan.switches):
        if switch.transform:
            options = config.switches[switch.name]
            building = Building(find_layout(model), options, plan, workers, partial(_loss_of_one, template))
            model = load_object(switch.transform)(model, building)
            del building
    recipe = template.build_optimizer()
    template.peak_lr = float(recipe.kwargs.get("lr", 0.0))
    engine.setup(model, recipe, template.compute_loss)
    template.model = engine.model
    return engine


def _loss_of_one(template: Trainer, model: nn.Module) -> Any:
    """The user's loss of the first sample."""
    request = Request([0], (template.config.training.seed, 0), [0])
    (microbatch,) = load(template.data.train, template.data, [request], workers=0, pin_memory=False)
    return template.compute_loss(model, microbatch.batch)


def _build_loop(
    template: Trainer,
    engine: Engine,
    order: Order,
    position: Position,
    folder: RunFolder | None,
    workers: Workers,
) -> Loop:
    training, data = template.config.training, template.data
    total = training.train_iters or order.steps_per_epoch * (training.epochs or 1)
    has_valid = data.valid is not None and len(data.valid) > 0
    evaluator = Evaluator(template, engine, data.valid, workers, training.eval_iters) if has_valid else None
    epoch = order.steps_per_epoch if order.by_epochs else 0
    return Loop(
        template=template,
        engine=engine,
        order=order,
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
        metrics=MetricsFile(folder.metrics, position.step) if folder and workers.is_main else None,
        meter=Meter(workers.device),
        receipts=Receipts(engine, [name for s in template.plan.switches for name in REGISTRY[s].receipt]),
        keep=training.keep_checkpoints,
        metric=_best_metric(template, evaluator),
        saver=AsyncSaver(folder.checkpoints, workers, training.keep_checkpoints)
        if folder and training.async_save
        else None,
        profile=_profile(template, folder, total - position.step, workers),
    )


def _profile(template: Trainer, folder: RunFolder | None, steps_left: int, workers: Workers) -> Profile | None:
    """The recorder of the main worker, if it is asked for; a complete run that is resumed has no step to record.

    Raises:
        ConfigError: the run is too short.
    """
    asked = template.config.training.profile
    if not asked or not steps_left or folder is None:
        return None
    if steps_left < WARMUP + asked:
        raise ConfigError(
            f"--profile {asked} needs {WARMUP + asked} steps, this run has {steps_left}",
            where=template.config.origin("profile"),
            hint=f"the first {WARMUP} are a warm-up; train for more steps, or record fewer",
        )
    return Profile(folder.profile, asked, workers.device) if workers.is_main else None


def _finish(loop: Loop, metrics: dict[str, float], workers: Workers) -> dict[str, Any]:
    template, folder, best = loop.template, loop.folder, loop.position.best
    if best and folder and best["step"] != loop.position.step:
        loop.engine.load(Reader(folder_of(folder.checkpoints, best["step"])), optimizer=False)
        metrics = {}
    if loop.evaluator and not metrics:  # other weights than the last evaluation's, or a run that was complete
        metrics = loop.evaluator.evaluate()
    if folder and template.config.training.export_model:
        export_model(loop.engine, template, folder.export, workers)
    receipts = loop.receipts.measured_by_rank() if loop.meter.steps else {}
    summary = summarise(template, loop, metrics, receipts, workers)
    if workers.is_main:
        show_results(folder, summary)
    workers.barrier()
    template.on_train_end(summary)
    return summary


def load_object(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


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
