"""The ``Trainer``: its hooks with their defaults, and ``fit``. Subclass it and override the hooks that you need.

>>> class Sentiment(Trainer):            # doctest: +SKIP
...     def compute_loss(self, model, batch):
...         return model(**batch).loss
>>> Sentiment.main()                     # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, NoReturn, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rapidformer_templates.data.collate import count_targets, samples_in
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.engines.collectives import gather_rows
from rapidformer_templates.engines.contract import ComputeLoss, Engine, StepResult
from rapidformer_templates.engines.optimizer_instances import TAKES_OPTIONS, as_recipe, as_schedule
from rapidformer_templates.engines.recipe import (
    OptimizerSpec,
    Schedule,
    default_optimizer,
    layerwise,
    schedule,
    undecayed,
)
from rapidformer_templates.errors import ConfigError, Explained, Interrupted, NoModel, long_names_explained
from rapidformer_templates.models.label_use import smoothed_labels
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run import configure, inference
from rapidformer_templates.run import fit as run
from rapidformer_templates.run.hooks import Callback, checked_callbacks
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.scripts import hook, intercept_for_planning, is_planning, note_use
from rapidformer_templates.run.session import Session, built_on_each_worker, open_session
from rapidformer_templates.system import launch
from rapidformer_templates.system.launch import is_worker
from rapidformer_templates.system.terminal import escape_unknown_characters

T = TypeVar("T")
P = ParamSpec("P")


def with_errors_in_code(method: Callable[Concatenate[Trainer, P], T]) -> Callable[Concatenate[Trainer, P], T]:
    """Let the errors of a method speak of arguments if the user gives the flags as arguments."""

    @wraps(method)
    def call(template: Trainer, *args: P.args, **named: P.kwargs) -> T:
        with configure.errors_in_code(type(template), enabled=template._has_arguments):
            return method(template, *args, **named)

    return call


@dataclass(frozen=True)
class Trained:
    """The model and the plan that ``fit()`` or an evaluation has left in a template."""

    run: Run | None = None  # has the whole model in this process
    weights: inference.Weights | None = None  # trained ones, that are not in a model yet
    missing: ConfigError | None = None  # why there is neither
    plan: Plan | None = None  # of the training


class Trainer:
    """The template with every switch. It trains by iterations or by epochs.

    An empty subclass works from flags alone. Hooks can use ``self.config`` (all flags), ``self.flags`` (your own
    flags), ``self.plan`` and ``self.task``. After ``build_data`` they can also use ``self.data``, and after
    ``build_model`` ``self.model``, which is the module that the engine trains.

    Args:
        argv: command line without the program's name. By default, a template reads the command line of the running
            script if that script creates it without any arguments. Every other template reads no command line.
        callbacks: objects whose methods are called after the template's own callbacks.
        flags: values by field name (``train_iters=100``). YAML and ``argv`` win over them.

    Raises:
        ConfigError: a flag is unknown, or its value cannot be used.
    """

    Flags: ClassVar[type | None] = None
    """A frozen dataclass with your own flags. Declare them with :func:`rapidformer_templates.flag`."""

    tokenizer: Any = None
    """The tokenizer or processor that is exported with the model. Set it if you build it yourself."""

    uses_task: bool = False
    """Whether the data come from ``--task``. If they do, the task's predictions and metrics fit them."""

    def __init__(self, argv: Sequence[str] | None = None, *, callbacks: Sequence[Callback] = (), **flags: Any) -> None:
        escape_unknown_characters()
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back  # the user's code
        where = launch.line_of(frame)
        self._has_arguments = False  # whether the user gives flags as arguments, and not on a command line
        if argv is None:
            asks = not flags and not callbacks and frame.f_globals.get("__name__") == "__main__"
            self._has_arguments = not asks
            argv = launch.program_arguments() if asks else []
        elif frame.f_globals.get("__name__") == "__main__":
            launch.show_mistakes_without_trace(argv)
        self.callbacks = checked_callbacks(callbacks)
        values = {name.replace("-", "_"): (value, where) for name, value in flags.items()}
        with configure.errors_in_code(type(self), enabled=self._has_arguments):
            self.config: RunConfig = configure.read_config(type(self), argv, values)
        self.flags: Any = self.config.user

    # Hooks for the model, the data and the loss.

    @hook
    def build_model(self) -> nn.Module:
        """Build the plain model, on any device. Called after ``build_data``."""
        return self.task.build_model()

    @hook
    def build_data(self) -> Data:
        """Build the data sets and a collate function. The training loop creates the data loaders."""
        data = self.task.build_data()
        self.uses_task, self.tokenizer = True, self.task.tokenizer
        return data

    @hook
    def compute_loss(self, model: Any, batch: Batch) -> Any:
        """Return the mean loss of the batch as a scalar tensor, or (sum of losses, number of targets).

        (mean loss, model output) is the mean loss, as in transformers' ``Trainer``.
        """
        with smoothed_labels(self.config.training.label_smoothing):
            return self.task.compute_loss(model, batch) if self.uses_task else model(**batch).loss

    @hook
    def count_targets(self, batch: Batch) -> float:
        """Return the number of targets that the loss of ``batch`` averages over.

        By default, every label that is not -100 is a target. If a causal model shifts its labels, the first label of
        each sample does not count. Without labels, every sample is a target. The number may be a fraction: for a mean
        with weights, it is the sum of the weights.
        """
        count = self.task.count_targets if self.uses_task else count_targets
        return count(batch, shifted=self._run is not None and self._run.labels_are_shifted)

    @hook
    def build_optimizer(self) -> OptimizerSpec:
        """Return the optimizer recipe.

        By default it follows ``--optimizer``, ``--lr``, ``--weight-decay``, ``--adam-…`` and ``--layerwise-lr-decay``.
        """
        training, groups = self.config.training, self._run.parameter_groups if self._run else undecayed
        if training.layerwise_lr_decay is not None:
            depths = self._run.depths if self._run else {}
            groups = layerwise(depths, training.layerwise_lr_decay, training.lr or 0.0, groups)
        return default_optimizer(self.plan, training, groups)

    @hook
    def build_scheduler(self, total_steps: int) -> Schedule:
        """Return a function that maps the step (from 0) to a fraction of the peak learning rate."""
        plan = self.plan
        return schedule(self.config.training, total_steps, plan.schedule, global_batch=plan.sizes.global_batch)

    # Hooks for the evaluation.

    @hook
    def read_outputs(self, outputs: Any, batch: Batch) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return (predictions, references) of an evaluated batch, with one entry per sample, on the host."""
        if not self.uses_task:
            return [None] * samples_in(batch), [None] * samples_in(batch)
        if self.task.generates:
            model: Any = self.model  # the task's own, which generates
            with self.engine.precision():
                outputs = self.task.generate(model, to_device(batch, next(model.parameters()).device))
        return self.task.predict(outputs, batch)

    @hook
    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        """Compute the metrics of a whole validation set from the results of :meth:`read_outputs`, in sample order.

        ``self.task.labels`` has the names of the classes, whose numbers ``sequence_classification`` predicts.
        """
        return self.task.compute_metrics(list(predictions), list(references)) if self.uses_task else {}

    # Callbacks. They run on every rank and do nothing by default.

    @hook
    def on_train_start(self) -> None:
        """Called before the first step of this process."""

    @hook
    def on_step_end(self, step: int, result: StepResult) -> None:
        """Called after each optimizer step. ``step`` counts from 1."""

    @hook
    def on_epoch_end(self, epoch: int) -> None:
        """Called after the last step of each epoch in a run whose length is given in epochs."""

    @hook
    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation."""

    @hook
    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called after each checkpoint has been written."""

    @hook
    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, evaluation and export."""

    # Members that hooks and callbacks use.

    def stop(self, reason: str = "stop() was called") -> None:
        """End the run after the current step, with the last evaluation, checkpoint and export of a complete run.

        Call it in a hook or a callback, on any worker. All workers end after the same step. ``summary.json`` has the
        reason under ``stopped_early``.
        """
        if self._run is not None:
            self._run.stop_reason = reason

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Add numbers, such as ``{"entropy": entropy}``, to the next line of ``metrics.jsonl`` and of the trackers.

        Call it in :meth:`compute_loss` or a callback, on any worker. A line has the mean of all finite values since the
        line before, over calls and workers. A tensor is read with the line, so the host does not wait in between. In
        an evaluation, ``compute_loss`` logs nothing.
        """
        if self._run is not None:
            self._run.log(values)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of a tensor from all replicas of the model, those of this worker first.

        Call it in :meth:`compute_loss` if the loss compares samples with those of other workers, as contrastive losses
        do. Every worker must call it. The gradients of all workers flow back to the rows. Workers that share a replica
        have the same rows, which occur once. Rows that only keep a worker busy at the end of an epoch are left out.
        """
        run = self._run
        return gather_rows(rows, run.workers) if run is not None and hasattr(run, "engine") else rows

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0. Use it in hooks to print or write something once."""
        return launch.is_first_worker()

    # Members that the library uses.

    @cached_property
    @with_errors_in_code
    def plan(self) -> Plan:
        """The plan of the run.

        Raises:
            Refused: the flags break rules. The error lists all of them.
        """
        return configure.resolve_plan(type(self), self.config, training=not self.config.own_loop)

    @cached_property
    def task(self) -> Task:
        """The task that ``--task`` names.

        Raises:
            ConfigError: ``--task`` is missing.
        """
        if self.config.training.task is None:
            raise ConfigError("--task is missing", hint="name a task, or override build_model() and build_data()")
        return load_task(self.config)

    @property
    def reads_task_data(self) -> bool:
        """Whether ``build_data`` is not overridden, so that the data flags can be checked before the run."""
        return type(self).build_data is Trainer.build_data

    @property
    def computes_own_metrics(self) -> bool:
        """Whether the user overrides ``compute_metrics``. Only a run can then show what it returns."""
        return type(self).compute_metrics is not Trainer.compute_metrics

    def override_flags(self, values: Mapping[str, object]) -> None:
        """Take over flags from the process that started this worker. The library calls it before it builds anything."""
        if values:
            several = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            self.set_config(self.config.replace("the process that started the workers", **{**values, **several}))

    def set_config(self, config: RunConfig) -> None:
        """Replace all flags. The library calls it."""
        self.config, self.flags = config, config.user
        for name in ("plan", "_plan_without_training", "task"):
            self.__dict__.pop(name, None)

    _run: Run | None = None  # the current run, or the last one
    _trained = Trained()
    _model: nn.Module | None = None  # a model that a hook has assigned
    _data: Data

    def run_begins(self, run: Run) -> None:
        """Share the data and the model of a run that begins. The library calls it."""
        self._run = run

    @property
    def data(self) -> Data:
        """The data sets of the run, once ``build_data`` has returned them."""
        return self._run.data if self._run is not None and hasattr(self._run, "data") else self._data

    @data.setter
    def data(self, data: Data) -> None:
        self._data = data
        if self._run is not None:
            self._run.data = data

    @property
    def engine(self) -> Engine:
        """The engine that trains the model, once it is set up."""
        if self._run is None:
            raise AttributeError(f"{type(self).__name__} has no engine yet: fit() sets it up")
        return self._run.engine

    @property
    def stop_reason(self) -> str | None:
        """The reason that :meth:`stop` was called with in this run, or None."""
        return self._run.stop_reason if self._run else None

    @with_errors_in_code
    def fit(self, workers: int | None = None) -> dict[str, Any]:
        """Train the model. Afterwards the program continues, and :attr:`model` is the trained model.

        Args:
            workers: number of local processes that train together. The template and its class are sent to them with
                cloudpickle, and they do not run the rest of the program again. Without this argument, the number is
                ``--nproc-per-node``. The workers then run the script again up to this call and exit after it, so code
                before the call runs in each of them. If the program is not a script, such as a notebook, the template
                is sent to them as well.

        Returns:
            The content of ``summary.json``.

        Raises:
            RapidformerError: a mistake that you can fix. If it can be detected in advance, nothing is started.
            Interrupted: the run was asked to stop, as by Ctrl-C. It is a ``KeyboardInterrupt``. :attr:`model` has the
                weights of the last step, also after an error in this process.
        """
        sends, is_one = workers is not None or not launch.is_script(), is_worker()
        starts_workers, before = False, self.config
        if workers is not None:
            where = "fit(workers=…)"
            self.set_config(before.replace(where, nproc_per_node=before.checked("nproc_per_node", workers, where)))
        try:
            intercept_for_planning(self)
            self._model, self._trained = None, Trained()
            starts_workers = not is_one and (self.config.launch.nproc_per_node or 1) > 1
            return run.fit(self, self._store_model, self._store_weights if sends else None)
        finally:
            trained = replace(self._trained, plan=vars(self).get("plan"))
            if trained.run is None and trained.weights is None and not is_one:
                save = self.config.training.save
                what = "fit() was stopped or has failed, and has left no trained model in this process"
                hint = "call fit() again" + (f", or use its last checkpoint: rapidformer export {save}" if save else "")
                if starts_workers and not sends:
                    what = "the model was trained in workers that ran this script, and is not in this process"
                    hint = "train with fit(workers=N), or use its export: rapidformer evaluate RUN, predict RUN"
                trained = replace(trained, missing=ConfigError(what, where=type(self).__name__, hint=hint))
            self._trained = trained
            if workers is not None:
                self.set_config(before)  # the argument applies to this call only

    @with_errors_in_code
    def compose(self, example: Batch | None = None) -> Session:
        """Create a session for your own loop, with the model, the loss, the optimizer and the flags of this template.

        It is :func:`compose` with hooks in place of arguments. ``build_data`` is not called.

        Args:
            example: a batch with one sample. A pipeline needs it, because it must see a loss before the first step.

        Raises:
            ConfigError: a flag has no effect in a session.
            Refused: the flags break rules. The error lists all of them.
            SystemExit: the workers that this process started have finished.
        """
        self._prepare_own_loop()
        return open_session(self, None, example)

    def _prepare_own_loop(self) -> None:
        """Plan for a loop that the user writes."""
        self.set_config(replace(self.config, own_loop=True))
        intercept_for_planning(self)

    @property
    def trained_plan(self) -> Plan:
        """The plan of the last training. Before training, a plan that needs neither a learning rate nor a length."""
        return self._trained.plan or self._plan_without_training

    @cached_property
    def _plan_without_training(self) -> Plan:
        return configure.resolve_plan(type(self), self.config, training=False)

    @property
    def model(self) -> nn.Module:
        """The model. Inside hooks it is the module that the engine trains.

        After ``fit()`` it is the trained, unsharded model in this process. If the run was stopped or has failed, it has
        the weights of the last step.

        Raises:
            NoModel: there is no model yet.
            ConfigError: ``fit()`` has left no model in this process.
        """
        run = self._run
        if self._trained.weights is not None or self._trained.missing:
            run = self._single_process_run()
        model = self._model
        if run is not None and (hasattr(run, "engine") or run.built is not None):
            model = run.model if hasattr(run, "engine") else run.built
        if model is None:
            raise NoModel(f"{type(self).__name__} has no model yet: fit() trains one, and evaluate() builds one")
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @with_errors_in_code
    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluate the model in this process and return its metrics. Before ``fit()`` the model is untrained.

        Args:
            data: a data set like ``Data.valid``, or rows with the task's columns: ``[{"text": …, "label": …}, …]``, a
                ``datasets.Dataset`` or a pandas ``DataFrame``. The default is the validation data.

        Raises:
            RapidformerError: the data cannot be used, or this process is one of several workers.
        """
        return inference.evaluate(self, self._single_process_run(), data)

    @with_errors_in_code
    def predict(
        self, samples: Any, *, batch_size: int = 8, max_new_tokens: int | None = None, temperature: float = 0.0
    ) -> Any:
        """Return the model's predictions for unlabelled samples. The model runs in this process.

        Args:
            samples: one sample or a list of samples. A sample is a text, a mapping with the task's columns, or a
                conversation as a list of messages (``[{"role": "user", "content": …}]``). If you override
                ``build_data``, it has the form of an item of ``Data.valid``. A ``datasets.Dataset`` or a pandas
                ``DataFrame`` is a list of its rows.
            batch_size: number of samples per batch.
            max_new_tokens: maximum number of tokens per answer, for tasks that generate text.
            temperature: sampling temperature, for tasks that generate text. 0 picks the most likely token.

        Returns:
            For each sample a record (docs/after-training.md), or the prediction that ``read_outputs`` returns. The
            result is a list unless ``samples`` is one sample.

        Raises:
            RapidformerError: a sample cannot be used, or this process is one of several workers.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}", where="predict()", hint="give a number of at least 1")
        generation = Generation(max_new_tokens, temperature, self.config.training.seed)
        return inference.predict(self, self._single_process_run(), samples, batch_size, generation)

    def _single_process_run(self) -> Run:
        """Return the run that has the whole model in this process. Build the model if there is none."""
        note_use()
        trained = self._trained
        if trained.missing:
            raise trained.missing
        if trained.run is not None:
            return trained.run
        self._trained = replace(trained, weights=None)  # hooks use the model that is being built
        try:
            run = inference.build_single_process(self, trained.weights)
        except BaseException:
            self._trained = trained
            raise
        self._trained = replace(self._trained, run=run)
        return run

    def _store_weights(self, weights: inference.Weights) -> None:
        self._trained = Trained(weights=weights)

    def _store_model(self, run: Run) -> None:
        """Store the trained model of a run in this process. It may have ended with an error."""
        if run.workers.world == 1 and inference.is_plain(run):
            self._trained = Trained(run)
            run.model.eval()
        elif run.workers.world == 1:
            self._store_weights(inference.copied_weights(run.engine))

    @classmethod
    def main(cls, **flags: Any) -> None:
        """Read the script's command line and train. Call it in the last line of a white-box script.

        Errors are shown without a stack trace. The exit status is 0, or that of the error.
        """
        try:
            with long_names_explained():
                cls(launch.program_arguments(), **flags).fit()
        except Explained as error:
            if is_planning():
                raise  # the command that inspects this script reports it
            _fail(error.render(), error.exit_status)
        except KeyboardInterrupt:  # it came before the run could treat it as a request to save and stop
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
    """Create a session that makes the optimizer steps for your training loop, with any engine.

    Rules, receipts, checkpoints and the computation of a step are the same as in a run. With ``nproc_per_node``, this
    process starts workers that run the script again, and it exits when they do.

    Args:
        model: a function that builds the model, or the model itself. The function runs on each worker, with random
            numbers seeded by ``seed``. If you give the model itself, all workers take the weights of rank 0.
        optimizer: a recipe, a torch class, a function from parameter groups to an optimizer, or an optimizer that was
            created for ``model`` and has not made a step. None uses ``--optimizer`` and ``--lr``.
        compute_loss: function from (model, batch) to the mean loss, or to (sum of losses, number of targets). None
            uses ``model(**batch).loss``.
        schedule: function from the step (from 0) to a fraction of the peak learning rate, or a torch scheduler. None
            uses ``--train-iters`` and ``--lr-decay-style``, or a constant rate without ``--train-iters``.
        count_targets: function from a batch to the number of targets that its loss averages over. None counts the
            labels that are not -100.
        example: a batch with one sample. A pipeline needs it, because it must see a loss before the first step.
        argv: flags as on a command line. They win over ``switches``.
        switches: flags by field name (``seed=1``), as in :class:`Trainer`.

    Raises:
        ConfigError: a flag or an optimizer cannot be used, or a flag has no effect here.
        Refused: the flags break rules. The error lists all of them.
        SystemExit: the workers that this process started have finished.
    """
    with configure.errors_in_code(Trainer, enabled=not argv):
        template = template_of_session(model, optimizer, compute_loss, count_targets, argv, switches)
        if optimizer is not None:
            template.build_optimizer()  # refuse an unusable optimizer before a worker starts
            # Flags that only configure the library's optimizer have no effect, except those that a class takes.
            accepted = OF_A_CLASS if isinstance(optimizer, TAKES_OPTIONS) else ()
            for name in sorted(OF_THE_OPTIMIZER.difference(accepted)):
                if name in template.config.origins:
                    message = f"{spelling(name)} has nothing to act on: the optimizer brings its own options"
                    hint = "leave it out and give the optimizer that option" + (
                        ", or give the optimizer's class" if name in OF_A_CLASS else ", or leave out the optimizer"
                    )
                    raise ConfigError(message, where=template.config.origin(name), hint=hint)
        steps = template.config.training.train_iters
        total = steps if isinstance(steps, int) else None
        return open_session(template, None if schedule is None else as_schedule(schedule, total), example)


OF_THE_OPTIMIZER = frozenset(
    ("lr", "weight_decay", "optimizer", "adam_beta1", "adam_beta2", "adam_epsilon", "layerwise_lr_decay")
)
"""Flags that only the library's own optimizer uses."""

OF_A_CLASS = ("lr", "weight_decay")
"""Flags that become options of the optimizer if the user gives its class."""


def template_of_session(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OptimizerSpec | Optimizer | Callable[..., Optimizer] | None,
    own_loss: ComputeLoss | None,
    own_count: Callable[[Batch], float] | None,
    argv: Sequence[str],
    switches: Mapping[str, Any],
) -> Trainer:
    """Create the template of a session. The arguments of :func:`compose` become its hooks, if they are given."""

    class Composed(Trainer):
        __module__ = getattr(own_loss, "__module__", "__main__")

        def build_model(self) -> nn.Module:
            return built_on_each_worker(model)

        @cached_property
        def recipe(self) -> OptimizerSpec:
            # Switches replace some parameters, so it is made once, from those that the optimizer was created for.
            assert optimizer is not None
            flags = {name: self.config.get(name) for name in OF_A_CLASS if name in self.config.origins}
            return as_recipe(optimizer, model, flags)

        if optimizer is not None:

            def build_optimizer(self) -> OptimizerSpec:
                return self.recipe

        if own_loss is not None:

            def compute_loss(self, model: Any, batch: Batch) -> Any:
                return own_loss(model, batch)

        if own_count is not None:

            def count_targets(self, batch: Batch) -> float:
                return own_count(batch)

    template = Composed(list(argv), **switches)
    template._prepare_own_loop()
    return template


def _fail(text: str, status: int) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(status)
