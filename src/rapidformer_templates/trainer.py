"""Trainer: the hooks with their defaults, and ``fit``. Subclass it, override what you need, turn switches on.

>>> class Sentiment(Trainer):            # doctest: +SKIP
...     def compute_loss(self, model, batch):
...         return model(**batch).loss
>>> Sentiment.main()                     # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from torch import nn

from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.targets import count_targets, samples_in
from rapidformer_templates.data.tasks import Task, load_task
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.engines.contract import StepResult
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
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.schedules import OF_SCHEDULES
from rapidformer_templates.planning.tasks import metrics_of
from rapidformer_templates.run import configure
from rapidformer_templates.run import fit as run
from rapidformer_templates.run.handover import at_the_door, is_asked_for
from rapidformer_templates.run.own_hooks import OF_THE_DATA, OF_THE_MODEL, OF_THE_TOKENIZER, hook
from rapidformer_templates.system import program


class Trainer:
    """The template with every switch. It trains by iterations or by epochs.

    An empty subclass works from flags alone. In hooks these are at hand: ``self.config`` (all
    flags), ``self.flags`` (your own), ``self.plan``, ``self.task``, after ``build_data``
    ``self.data``, and after ``build_model`` ``self.model``, as the engine left it.

    Args:
        argv: the command line without the program's name. Without it and without flags it is that of the
            script that runs; in a notebook, at a prompt or with flags, none is read.
        flags: values that this script prefers, by field name (``train_iters=100``). YAML and the
            command line win over them.

    Raises:
        ConfigError: an unknown flag, or a value that cannot be used.
    """

    Flags: ClassVar[type | None] = None
    """A frozen dataclass of your own flags, declared with :func:`rapidformer_templates.flag`."""

    data: Data
    model: nn.Module
    peak_lr: float

    tokenizer: Any = None
    """Exported with the model; set it where you build one of your own."""

    uses_task: bool = False
    """Whether the data come from ``--task``, so that its predictions and metrics fit them."""

    def __init__(self, argv: Sequence[str] | None = None, **flags: Any) -> None:
        where = _caller()
        if argv is None:
            argv = [] if flags else program.arguments()
        self.config: RunConfig = configure.read_config(
            type(self), argv, {name: (value, where) for name, value in flags.items()}
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
    def predict(self, outputs: Any, batch: Batch) -> tuple[Sequence[Any], Sequence[Any]]:
        """(predictions, references) of an evaluated batch, one entry a sample, on the host."""
        if not self.uses_task:
            return [None] * samples_in(batch), [None] * samples_in(batch)
        if self.task.generates:
            outputs = self.task.generate(self.model, to_device(batch, next(self.model.parameters()).device))
        return self.task.predict(outputs, batch)

    @hook()
    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        """Metrics of a whole validation set, from what :meth:`predict` gave for each sample, in its order."""
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
            self.config = self.config.replace("the process that started the workers", **{**values, **several})
            self.flags = self.config.user
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
            shifts = self.task.use_labels(use)
            if type(self).compute_loss is Trainer.compute_loss:
                self._labels_are_shifted = shifts
            elif shifts and not use.shifts:
                notes.append(f"{use.model} does not shift labels, nor does this task here: your compute_loss must")
        return notes

    def fit(self) -> dict[str, Any]:
        """Train, starting local workers first if ``--nproc-per-node`` asks for them.

        Such a worker runs the script again up to this call and ends after it: what stands before the call
        happens in each worker, what follows happens once.

        Returns:
            What ``summary.json`` holds.

        Raises:
            RapidformerError: a mistake that you can mend; nothing was started if it could be seen before.
        """
        at_the_door(self)
        return run.fit(self)

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


def _caller() -> str:
    """The place in the user's script that we were called from: ``train.py:8``."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _fail(text: str, status: int) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(status)
