"""The :class:`Run`: what the loop, the evaluation, the receipts and the export of a run share on one worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.order import Order
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.recipe import GroupOptions, undecayed
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run.callbacks import Callback
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.hooks import Hooks, checked_count
from rapidformer_templates.run.index_limits import IndexLimits
from rapidformer_templates.run.position import Position
from rapidformer_templates.run.script_hooks import overridden_hooks
from rapidformer_templates.system.workers import Workers


@dataclass
class Run:
    """A run on this worker: a training, an evaluation or a session.

    It begins with a plan and the user's hooks. The other fields are set in the order in which a run gets them: the
    data, the model with its engine, and the position at which the training begins.

    Attributes:
        plan: the effect of the flags.
        config: the flags.
        hooks: the user's template.
        callbacks: objects that are called after the template's own callbacks.
        workers: this process and its peers.
        folder: the run folder. None without ``--save``.
        stop_reason: the reason that a hook called ``stop`` with, or None.
        data: the data sets of ``build_data``.
        task: the task whose data they are. None if the user's data have another form.
        index_limits: the sizes of the model's vocabulary and head, which batches are compared with.
        labels_are_shifted: whether the model compares each label with the output before it.
        parameter_groups: the optimizer options of each parameter, if it follows the flags.
        engine: trains the model.
        peak_lr: the learning rate of the optimizer recipe.
        order: the order of the training samples.
        position: the progress of the training.
    """

    plan: Plan
    config: RunConfig
    hooks: Hooks
    callbacks: tuple[Callback, ...]
    workers: Workers
    folder: RunFolder | None = None
    stop_reason: str | None = None

    data: Data = field(init=False)
    task: Task | None = field(init=False, default=None)

    index_limits: IndexLimits = field(init=False, default=IndexLimits())
    labels_are_shifted: bool = field(init=False, default=False)
    parameter_groups: GroupOptions = field(init=False, default=undecayed)
    engine: Engine = field(init=False)
    peak_lr: float = field(init=False)

    order: Order = field(init=False)
    position: Position = field(init=False, default_factory=Position)

    @property
    def model(self) -> nn.Module:
        """The model, as the engine trains it."""
        return self.engine.model

    def overrides(self, hook: str) -> bool:
        """Whether the user overrides a hook."""
        return hook in overridden_hooks(type(self.hooks))

    def notify(self, event: str, *values: object) -> None:
        """Call a callback of the hooks, and then that of each callback object."""
        getattr(self.hooks, event)(*values)
        for callback in self.callbacks:
            getattr(callback, event)(self.hooks, *values)

    def with_target_count(self, microbatch: MicroBatch, name: str = "training samples") -> MicroBatch:
        """Record what the host must know about a micro batch (targets, size, masks) before it moves to the device.

        Args:
            name: what its samples are called in messages.

        Raises:
            DataError: a token id or a label is outside of the model's tables.
        """
        self.index_limits.check(microbatch, name)
        microbatch.targets = 0 if microbatch.idle else checked_count(self.hooks.count_targets(microbatch.batch))
        microbatch.size = (microbatch.sample_count, microbatch.tokens)
        microbatch.inspect_masks()
        return microbatch
