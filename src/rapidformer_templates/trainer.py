"""Trainer: the hooks with their defaults, and ``fit``. Subclass it, override what you need, turn switches on.

>>> class Sentiment(Trainer):            # doctest: +SKIP
...     def compute_loss(self, model, batch):
...         return model(**batch).loss
>>> Sentiment.main()                     # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, ClassVar, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.targets import count_targets, samples_in
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.engines.contract import ComputeLoss, Engine, StepResult
from rapidformer_templates.engines.given_optimizer import TAKES_OPTIONS, as_recipe, as_schedule
from rapidformer_templates.engines.layerwise_rates import depths_of, layerwise
from rapidformer_templates.engines.recipe import (
    GroupOptions,
    OptimizerSpec,
    Schedule,
    default_optimizer,
    schedule,
    undecayed,
)
from rapidformer_templates.errors import ConfigError, Interrupted, RapidformerError
from rapidformer_templates.models.label_smoothing import smoothed_labels
from rapidformer_templates.models.label_use import LabelUse
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.schedules import OF_SCHEDULES
from rapidformer_templates.planning.tasks import metrics_of
from rapidformer_templates.run import afterwards, configure, sent
from rapidformer_templates.run import fit as run
from rapidformer_templates.run.callbacks import Callback, checked_callbacks
from rapidformer_templates.run.handover import at_the_door, is_asked_for
from rapidformer_templates.run.own_hooks import OF_THE_DATA, OF_THE_MODEL, OF_THE_TOKENIZER, hook, hooks_of
from rapidformer_templates.run.session import Session, open_session, same_weights
from rapidformer_templates.system import program
from rapidformer_templates.system.launch import is_worker
from rapidformer_templates.system.workers import Workers


class Trainer:
    """The template with every switch. It trains by iterations or by epochs.

    An empty subclass works from flags alone. In hooks these are at hand: ``self.config`` (all
    flags), ``self.flags`` (your own), ``self.plan``, ``self.task``, after ``build_data``
    ``self.data``, and after ``build_model`` ``self.model``, as the engine left it.

    Args:
        argv: the command line without the program's name. A template that is made with nothing at all, by the code
            of the script that runs, reads that script's; no other one reads any.
        callbacks: objects that are told what the callbacks of the template are told.
        flags: values by field name (``train_iters=100``). YAML and ``argv`` win over them.

    Raises:
        ConfigError: an unknown flag, or a value that cannot be used.
    """

    Flags: ClassVar[type | None] = None
    """A frozen dataclass of your own flags, declared with :func:`rapidformer_templates.flag`."""

    data: Data
    engine: Engine
    peak_lr: float

    tokenizer: Any = None
    """Exported with the model; set it where you build one of your own."""

    uses_task: bool = False
    """Whether the data come from ``--task``, so that its predictions and metrics fit them."""

    def __init__(self, argv: Sequence[str] | None = None, *, callbacks: Sequence[Callback] = (), **flags: Any) -> None:
        frame = _caller()
        where = program.line_of(frame)
        if argv is None:
            asks = not flags and not callbacks and frame.f_globals.get("__name__") == "__main__"
            argv = program.arguments() if asks else []
        self.callbacks = checked_callbacks(callbacks)
        self.config: RunConfig = configure.read_config(
            type(self), argv, {name.replace("-", "_"): (value, where) for name, value in flags.items()}
        )
        self.flags: Any = self.config.user

    # The hooks of the model, the data and the loss.

    @hook(*OF_THE_MODEL, *OF_THE_TOKENIZER, "sentence_pairs")
    def build_model(self) -> nn.Module:
        """The model, plain and on no particular device. Called after ``build_data``."""
        return self.task.build_model()

    @hook(*OF_THE_DATA, *OF_THE_TOKENIZER)
    def build_data(self) -> Data:
        """Data sets and a collate function; the loop makes the loaders."""
        data = self.task.build_data()
        self.uses_task, self.tokenizer = True, self.task.tokenizer
        return data

    @hook("label_smoothing")
    def compute_loss(self, model: Any, batch: Batch) -> Any:
        """The mean loss of the batch as a scalar tensor, or (sum of losses, number of targets)."""
        with smoothed_labels(self.config.training.label_smoothing):
            return self.task.compute_loss(model, batch) if self.uses_task else model(**batch).loss

    @hook()
    def count_targets(self, batch: Batch) -> float:
        """Number of targets that the loss of ``batch`` is a mean over.

        By default the labels that are not -100 (of a causal model that shifts its labels, without
        the first of each sample); without labels, the samples.
        """
        count = self.task.count_targets if self.uses_task else count_targets
        return count(batch, shifted=self._labels_are_shifted)

    @hook("lr", "weight_decay", "optimizer", "adam_beta1", "adam_beta2", "adam_epsilon", "layerwise_lr_decay")
    def build_optimizer(self) -> OptimizerSpec:
        """A recipe for the optimizer, by default of ``--optimizer`` with ``--lr``, ``--weight-decay``, ``--adam-…``."""
        training, groups = self.config.training, self._groups
        if training.layerwise_lr_decay is not None:
            groups = layerwise(self._depths, training.layerwise_lr_decay, training.lr or 0.0, groups)
        return default_optimizer(self.plan, training, groups)

    @hook(*OF_SCHEDULES)
    def build_scheduler(self, total_steps: int) -> Schedule:
        """A function from the step (from 0) to a share of the peak learning rate."""
        return schedule(
            self.config.training, total_steps, self.plan.schedule, global_batch=self.plan.sizes.global_batch
        )

    # The hooks of the evaluation.

    @hook()
    def read_outputs(self, outputs: Any, batch: Batch) -> tuple[Sequence[Any], Sequence[Any]]:
        """(predictions, references) of an evaluated batch, one entry a sample, on the host."""
        if not self.uses_task:
            return [None] * samples_in(batch), [None] * samples_in(batch)
        if self.task.generates:
            outputs = self.task.generate(self.model, to_device(batch, next(self.model.parameters()).device))
        return self.task.predict(outputs, batch)

    @hook()
    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        """Metrics of a whole validation set, from what :meth:`read_outputs` gave for each sample, in its order."""
        return self.task.compute_metrics(list(predictions), list(references)) if self.uses_task else {}

    # Callbacks; they do nothing by default and run on every rank.

    @hook()
    def on_train_start(self) -> None:
        """Before the first step of this process."""

    @hook()
    def on_step_end(self, step: int, result: StepResult) -> None:
        """After each optimizer step; ``step`` counts from 1."""

    @hook()
    def on_epoch_end(self, epoch: int) -> None:
        """After the last step of an epoch of an epoch-based run."""

    @hook()
    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    @hook()
    def on_checkpoint(self, step: int, folder: Path) -> None:
        """After a checkpoint was written."""

    @hook()
    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        """After the last step, evaluation and export."""

    # What the library itself asks.

    @cached_property
    def plan(self) -> Plan:
        """What the run will do.

        Raises:
            Refused: the flags break rules; all of them are named.
        """
        return configure.resolve_plan(type(self), self.config)

    @cached_property
    def task(self) -> Task:
        """The task of ``--task``.

        Raises:
            ConfigError: there is none.
        """
        if self.config.training.task is None:
            raise ConfigError("--task is missing", hint="name a task, or override build_model() and build_data()")
        return load_task(self.config)

    @property
    def reads_task_data(self) -> bool:
        """Whether ``build_data`` is the library's own, so that the data flags can be checked beforehand."""
        return type(self).build_data is Trainer.build_data

    @property
    def reports_perplexity(self) -> bool:
        """Whether the loss is the log-likelihood of a token, so that its exponential means something."""
        return "perplexity" in metrics_of(self.config)

    @property
    def computes_own_metrics(self) -> bool:
        """Whether ``compute_metrics`` is the user's own: only a run can show what it gives."""
        return type(self).compute_metrics is not Trainer.compute_metrics

    def adopt(self, values: Mapping[str, Any]) -> None:
        """Take flags from the process that started this worker; the library calls it before anything is built."""
        if values:
            several = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            self._take("the process that started the workers", {**values, **several})

    def _take(self, origin: str, values: Mapping[str, Any]) -> None:
        self._use(self.config.replace(origin, **values))

    def _use(self, config: RunConfig) -> None:
        self.config, self.flags = config, config.user
        for name in ("plan", "task"):
            self.__dict__.pop(name, None)

    _labels_are_shifted = False
    _groups: GroupOptions = staticmethod(undecayed)
    _depths: Mapping[str, int] = MappingProxyType({})

    def model_was_built(self, model: nn.Module) -> None:
        """Note which parameters the optimizer treats alike; the library calls it with what ``build_model`` returned."""
        groups = OPTIMIZERS[self.plan.optimizer].groups
        self._groups = load_object(groups)(model) if groups else undecayed
        self._depths = depths_of(model)
        for module in model.modules():  # also one inside of a module of the user's own
            settings: Any = getattr(module, "config", None)
            if hasattr(settings, "use_cache"):
                # Keys and values kept for generation are wasted here, and wrong when a block is computed twice.
                settings.use_cache = False

    def labels_were_tried(self, use: LabelUse) -> list[str]:
        """Note how the model takes labels; the library calls it before the first batch is counted.

        Returns:
            What people should know of it.
        """
        self._labels_are_shifted = use.shifts
        notes = [f"{use.model} could not be tried ({use.untried}): by its name it shifts labels"] if use.untried else []
        if self.uses_task:
            self.task.label_use = use
            shifts = self.task.use_labels(use)
            if type(self).compute_loss is Trainer.compute_loss:
                self._labels_are_shifted = shifts
            elif shifts and not use.shifts:
                notes.append(f"{use.model} does not shift labels, nor does this task here: your compute_loss must")
        return notes

    def fit(self, workers: int | None = None) -> dict[str, Any]:
        """Train; afterwards the program goes on as it was, with :attr:`model`.

        Args:
            workers: local processes that train together. This template is sent to them by cloudpickle, with its class;
                nothing of the program around it is run again. Without it ``--nproc-per-node`` counts: its workers
                run the script again up to this call and end after it, so that what stands before the call happens
                in each of them; where there is no script, the template is sent to them, too.

        Returns:
            What ``summary.json`` holds.

        Raises:
            RapidformerError: a mistake that you can mend; nothing was started if it could be seen before.
        """
        sends = workers is not None or not program.is_script()
        asked = self.config
        if workers is not None:
            where = "fit(workers=…)"
            self._take(where, {"nproc_per_node": self.config.checked("nproc_per_node", workers, where)})
        try:
            summary = self._fit(sends)
            self._trained_plan = vars(self).get("plan")
            return summary
        finally:
            if workers is not None:
                self._use(asked)  # the workers of this call are not those of the next one

    def _fit(self, sends: bool) -> dict[str, Any]:
        at_the_door(self)
        self._model = self._weights = self._engine = None
        self._elsewhere = False
        if sends and not is_worker() and (self.config.launch.nproc_per_node or 1) > 1:
            summary, self._weights = sent.fit(self)
            return summary
        summary = run.fit(self, self._keep)
        self._elsewhere = self._engine is None and self._weights is None
        return summary

    @property
    def trained_plan(self) -> Plan:
        """The plan of the training that has ended; without one, what a run would do."""
        return self._trained_plan or self.plan

    _trained_plan: Plan | None = None
    _model: nn.Module | None = None
    _weights: afterwards.Weights | None = None
    _engine: Engine | None = None
    _elsewhere = False  # whether the trained model is in workers, which are gone

    @property
    def model(self) -> nn.Module:
        """The model: in hooks as the engine left it; after ``fit`` trained, whole and plain, in this process.

        Raises:
            AttributeError: there is none yet.
        """
        if self._model is None and (self._weights is not None or self._elsewhere):
            self._here()
        if self._model is None:
            raise AttributeError(f"{type(self).__name__} has no model yet: fit() trains one, and evaluate() builds one")
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The metrics of the model in this process; without ``fit`` before, of the untrained one.

        Args:
            data: a data set like ``Data.valid``, or rows of a task's columns (``[{"text": …, "label": …}, …]``);
                without it the validation part.

        Raises:
            RapidformerError: the data cannot be used, or this process is one of several workers.
        """
        return afterwards.evaluate(self, self._here(), data)

    def predict(
        self, samples: Any, *, batch_size: int = 8, max_new_tokens: int | None = None, temperature: float = 0.0
    ) -> Any:
        """What the model says of samples that nobody has labelled, in this process.

        Args:
            samples: one, or a list of them: a text or a mapping of a task's columns; with a ``build_data`` of your own
                what an item of ``Data.valid`` is.
            batch_size: samples at once.
            max_new_tokens: of tasks that generate text, the most tokens of an answer.
            temperature: of the same, how much they draw; 0 takes the likeliest token.

        Returns:
            A record a sample (docs/after-training.md), or what ``read_outputs`` makes of it; of one sample, its own.

        Raises:
            RapidformerError: a sample cannot be used, or this process is one of several workers.
        """
        several = samples if isinstance(samples, list) else [samples]
        generation = Generation(max_new_tokens, temperature, self.config.training.seed)
        found = afterwards.predict(self, self._here(), several, batch_size, generation)
        return found if several is samples else found[0]

    def _here(self) -> Engine:
        """What has the model in this process."""
        if self._elsewhere:
            raise ConfigError(
                "the model was trained in workers that ran this script, and is not in this process",
                where=f"{type(self).__name__}",
                hint="train with fit(workers=N), or use what it has exported: rapidformer evaluate RUN, predict RUN",
            )
        if self._engine is None:
            self._engine, self._weights = afterwards.build_alone(self, self._weights), None
        return self._engine

    def _keep(self, engine: Engine, workers: Workers) -> None:
        """Keep what a run of this process alone has trained."""
        if workers.world > 1:
            return
        if afterwards.is_plain(engine, self):
            self._engine = engine
            engine.model.eval()
        else:
            self._model, self._weights = None, afterwards.whole_weights(engine)

    @classmethod
    def main(cls, **flags: Any) -> None:
        """Read the script's command line and train: the last line of a white-box script.

        Mistakes are shown without a stack trace. The exit status is 0, or that of the error.
        """
        try:
            template = cls(program.arguments(), **flags)
            template.fit()
        except RapidformerError as error:
            if is_asked_for():
                raise  # whoever has asked says it
            _fail(error.render(), error.exit_status)
        except KeyboardInterrupt:  # before the run handles it as a request to save and end
            _fail("interrupted", Interrupted.LOST)


def compose(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OptimizerSpec | Optimizer | Callable[..., Optimizer] | None = None,
    compute_loss: ComputeLoss | None = None,
    *,
    schedule: Schedule | LRScheduler | None = None,
    count_targets: Callable[[Batch], float] | None = None,
    example: Batch | None = None,
    argv: Sequence[str] = (),
    **switches: Any,
) -> Session:
    """Switches for a loop of your own: a session that makes the optimizer steps of any engine.

    The rules, the receipts and the checkpoints are those of a run, and so is what a step computes. With
    ``nproc_per_node`` this process starts workers, each of which runs the script again, and ends with them.

    Args:
        model: a function that builds it, which is called with ``seed`` on each worker; or the model, of which all
            workers take the weights of rank 0.
        optimizer: a recipe; a class of torch or a function from parameter groups to an optimizer; an optimizer that
            was made for ``model`` and has made no step; None for that of ``--optimizer`` and ``--lr``.
        compute_loss: from (model, batch) to the mean loss, or to (sum of losses, number of targets); None for
            ``model(**batch).loss``.
        schedule: from the step (from 0) to a share of the peak rate, or a scheduler of torch; None for that of
            ``--train-iters`` and ``--lr-decay-style``, or, without an end, for a constant rate.
        count_targets: how many targets the loss of a batch is a mean over; by default the labels that are not -100.
        example: a batch of one sample, for a pipeline, which must see a loss before the first step.
        argv: flags in the words of a command line, which win over ``switches``.
        switches: flags by field name (``seed=1``), each as in :class:`Trainer`.

    Raises:
        ConfigError: a flag or an optimizer that cannot be used, or that nothing here would act on.
        Refused: the flags break rules; all of them are named.
        SystemExit: the workers that this process has started are done.
    """
    template = composed(model, optimizer, compute_loss, count_targets, argv, switches)
    if optimizer is not None:
        _check_options(template, OF_A_CLASS if isinstance(optimizer, TAKES_OPTIONS) else ())
    steps = template.config.training.train_iters
    return open_session(template, None if schedule is None else as_schedule(schedule, steps), example)


OF_A_CLASS = ("lr", "weight_decay")
"""Flags that become options of an optimizer's class."""


def _check_options(template: Trainer, taken: Sequence[str]) -> None:
    """Refuse flags that act through the library's own optimizer alone, beside one of the user's.

    Raises:
        ConfigError: such a flag was given.
    """
    for name in sorted(hooks_of(Trainer)["build_optimizer"] - {*taken}):
        if name in template.config.origins:
            raise ConfigError(
                f"{spelling(name)} has nothing to act on: the optimizer brings its own options",
                where=template.config.origin(name),
                hint="leave it out and give the optimizer that option"
                + (", or give the optimizer's class" if name in OF_A_CLASS else ", or leave out the optimizer"),
            )


def composed(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OptimizerSpec | Optimizer | Callable[..., Optimizer] | None,
    compute_loss: ComputeLoss | None,
    count_targets: Callable[[Batch], float] | None,
    argv: Sequence[str],
    switches: Mapping[str, Any],
) -> Trainer:
    """The template of a session, with the arguments of :func:`compose` as its hooks."""
    hooks: dict[str, Any] = {
        "__module__": getattr(compute_loss, "__module__", "__main__"),
        "plan": cached_property(lambda self: configure.resolve_plan(type(self), self.config, training=False)),
        "build_model": lambda self: same_weights(model) if isinstance(model, nn.Module) else model(),
    }
    if optimizer is not None:
        # Once, while the model still has the parameters that an optimizer was made for: switches replace some of them.
        recipe = cache(lambda *names: as_recipe(optimizer, model, _given(template.config, *names)))
        hooks["build_optimizer"] = lambda self: recipe(*OF_A_CLASS)
    if compute_loss is not None:
        hooks["compute_loss"] = lambda self, model, batch: compute_loss(model, batch)
    if count_targets is not None:
        hooks["count_targets"] = lambda self, batch: count_targets(batch)
    template: Trainer = type("Composed", (Trainer,), hooks)(list(argv), **switches)
    at_the_door(template)
    if optimizer is not None:
        template.build_optimizer()  # what cannot be used is refused before a worker starts
    return template


def _given(config: RunConfig, *names: str) -> dict[str, Any]:
    """The flags among these that were given."""
    return {name: config.get(name) for name in names if name in config.origins}


def _caller() -> FrameType:
    """The user's code that we were called from."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _fail(text: str, status: int) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(status)
