"""The :class:`Run`: what the loop, the evaluation, the receipts and the export of a run share on one worker.

A run begins with a :class:`Template`, and :class:`Position` is its progress.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypedDict

import torch
from torch import nn

from rapidformer_templates.data.fingerprints import Fingerprint
from rapidformer_templates.data.loader import MicroBatch, load, processes_of
from rapidformer_templates.data.order import BatchRequest, Order
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.types import Bookmark, Data, Endless, SampleSet, kind_of
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.current_batch import has_samples
from rapidformer_templates.engines.recipe import GroupOptions, undecayed
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.hooks import Callback, CallbackStates, Hooks, checked_count, is_number
from rapidformer_templates.run.scripts import overridden_hooks
from rapidformer_templates.run.step_errors import IndexLimits
from rapidformer_templates.run.watch import OWN_CODE, STEP, HangWatch
from rapidformer_templates.system.process_state import MemoryPeak
from rapidformer_templates.system.workers import Workers


class Best(TypedDict):
    """The best evaluation of a run: its step, and the metric that selects it with its value."""

    step: int
    metric: str
    value: float


@dataclass
class Position:
    """The progress of a run, saved with each checkpoint.

    Attributes:
        step: number of completed optimizer steps.
        samples, tokens: number consumed since the start of the run.
        best: the best evaluation so far, if the run tracks one.
        best_loss: the loss of that evaluation. It decides between equal values of the metric.
        evaluations_since_best: number of evaluations since the metric was last better than before.
        data: everything that the order of the data depends on. A resumed run must match it.
        fingerprint: of the training samples. A resumed run must have the same.
        base: identity of the frozen weights under adapters, which are not in the checkpoint. None without adapters.
        settings: see :class:`~rapidformer_templates.engines.assembly.Assembly`. A resumed run must have the same.
        stream: position in a stream of samples. None if the data is not a stream.
        sums: sum and number of the values since the last line of metrics, by name. See
            :class:`~rapidformer_templates.run.log.Means`.
        callbacks: states of the callbacks by name.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    best: Best | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    data: dict[str, object] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)
    base: str | None = None
    settings: dict[str, object] = field(default_factory=dict)
    stream: Bookmark | None = None
    sums: dict[str, list[float]] = field(default_factory=dict)
    callbacks: CallbackStates = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Completed steps, samples and tokens: the units of an interval."""
        return {"steps": self.step, "samples": self.samples, "tokens": self.tokens}

    def advance(self, exchanged: Mapping[str, float]) -> tuple[int, int]:
        """Count a step. Returns its samples and tokens, from the result of :meth:`Run.exchange`."""
        samples, tokens = int(exchanged["samples"]), int(exchanged["tokens"])
        self.step, self.samples, self.tokens = self.step + 1, self.samples + samples, self.tokens + tokens
        return samples, tokens

    def to_state(self) -> dict[str, object]:
        """Return the values for a checkpoint. ``waited`` is the key of the evaluations since the best one."""
        state = dataclasses.asdict(self)
        state["waited"] = state.pop("evaluations_since_best")
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Restore the values of a checkpoint. An older version saved fewer of them."""
        values = {**state, "evaluations_since_best": state.get("waited", 0)}
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


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
        trains: False if the model is only evaluated, so that it needs no optimizer.
        has_values: False if the run is only planned, and tensors have no data.
        stop_reason: the reason that a hook called ``stop`` with, or None.
        logged: numbers that hooks on this worker have logged for the next line of metrics. None without such lines.
        watch: knows the phase of this worker, and finds workers that make no progress.
        data: the data sets of ``build_data``.
        task: the task whose data they are. None if the user's data have another form.
        index_limits: the sizes of the model's vocabulary and head, which batches are compared with.
        labels_are_shifted: whether the model compares each label with the output before it.
        parameter_groups: the options in which the planned optimizer treats some parameters differently.
        depths: the depths of the layers, for a learning rate per layer. See
            :func:`~rapidformer_templates.engines.recipe.depths_of`.
        built: the model before the engine has it. None until ``build_model`` has returned.
        engine: trains the model.
        setup_peak: memory that building, loading and setting up the model needed.
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
    trains: bool = True
    has_values: bool = True
    stop_reason: str | None = None
    logged: dict[str, list[torch.Tensor | float]] | None = None

    watch: HangWatch = field(init=False)
    data: Data = field(init=False)
    task: Task | None = field(init=False, default=None)

    index_limits: IndexLimits = field(init=False, default=IndexLimits())
    labels_are_shifted: bool = field(init=False, default=False)
    parameter_groups: GroupOptions = field(init=False, default=undecayed)
    depths: Mapping[str, int] = field(init=False, default_factory=dict)
    built: nn.Module | None = field(init=False, default=None)
    engine: Engine = field(init=False)
    setup_peak: MemoryPeak = field(init=False)
    peak_lr: float = field(init=False)

    order: Order = field(init=False)
    position: Position = field(init=False, default_factory=Position)

    def __post_init__(self) -> None:
        self.watch = HangWatch(self.workers.clock)

    @property
    def model(self) -> nn.Module:
        """The model, as the engine trains it."""
        return self.engine.model

    def overrides(self, hook: str) -> bool:
        """Whether the user overrides a hook."""
        return hook in overridden_hooks(type(self.hooks))

    def notify(self, event: str, *values: object) -> None:
        """Call a callback of the hooks, and then that of each callback object."""
        self.watch.enter(OWN_CODE, self.position.step)
        getattr(self.hooks, event)(*values)
        for callback in self.callbacks:
            getattr(callback, event)(self.hooks, *values)

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Keep numbers for the next line of metrics. The losses of evaluations and trials log nothing.

        Raises:
            RapidformerError: a value is not a number.
        """
        in_loss = self.watch.phase == STEP and has_samples() and self.model.training
        if self.logged is None or not (in_loss or self.watch.phase == OWN_CODE):
            return
        for name, value in values.items():
            if not is_number(value):
                hint = "give a number, or a tensor with one element"
                raise RapidformerError(f"{name} is {kind_of(value)}", where="log(values)", hint=hint)
            self.logged.setdefault(name, []).append(value.detach() if isinstance(value, torch.Tensor) else value)

    def exchange(self, microbatches: Sequence[MicroBatch], **values: float) -> dict[str, float]:
        """Return sums over the ranks by name: of these values, and the ``targets``, ``samples`` and ``tokens``.

        Workers of one replica have the same micro batches, so only one of them counts.
        """
        counting = [m for m in microbatches if not m.idle and self.workers.is_replica_leader]
        values["targets"] = sum(m.targets for m in counting)
        values["samples"] = sum(m.sample_count for m in counting)
        values["tokens"] = sum(m.tokens for m in counting)
        return dict(zip(values, self.workers.sum(*values.values()), strict=True))

    def load(self, samples: SampleSet | Endless, requests: Iterable[BatchRequest]) -> Iterator[MicroBatch]:
        """Return micro batches on the host. Loader processes make them, as the flags or the device ask for."""
        workers, pin_memory = processes_of(self.config.data, self.workers.device)
        return load(samples, self.data, requests, workers=workers, pin_memory=pin_memory)

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


class Template(Hooks, Protocol):
    """A :class:`rapidformer_templates.Trainer`, which is defined above this package and documents each member."""

    Flags: ClassVar[type | None]
    config: RunConfig
    callbacks: tuple[Callback, ...]

    @property
    def plan(self) -> Plan: ...
    @property
    def trained_plan(self) -> Plan: ...
    @property
    def reads_task_data(self) -> bool: ...
    @property
    def computes_own_metrics(self) -> bool: ...

    def override_flags(self, values: Mapping[str, object]) -> None: ...
    def run_begins(self, run: Run) -> None: ...


def begin_run(template: Template, workers: Workers, folder: RunFolder | None = None, *, trains: bool = True) -> Run:
    """Return a run of a template on this worker. The template's hooks use the data and the model of this run."""
    run = Run(template.plan, template.config, template, template.callbacks, workers, folder, trains)
    template.run_begins(run)
    return run
