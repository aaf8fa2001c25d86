"""A session: the plan, the engine and the checkpoints of a run, for a training loop that the user writes."""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase

from rapidformer_templates.data.collate import samples_in
from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.engines.collectives import gather_rows
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.engines.recipe import Schedule
from rapidformer_templates.engines.step import Step
from rapidformer_templates.errors import CheckpointError, ConfigError, DataError, Explained, OutOfMemory
from rapidformer_templates.models.architectures import has_chosen_frequencies
from rapidformer_templates.models.blocks import in_eval_mode
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import no_device
from rapidformer_templates.planning.flag_values import Epochs
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.schedules import OF_SCHEDULES
from rapidformer_templates.run import out_of_memory
from rapidformer_templates.run.building import build_engine, choose_allocation, prepare_switches
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.configure import chosen_layout, resolve_plan
from rapidformer_templates.run.console import show_plan, what_was_done
from rapidformer_templates.run.export import export_model
from rapidformer_templates.run.folder import RunFolder, Summary
from rapidformer_templates.run.hooks import checked_schedule
from rapidformer_templates.run.performance import Meter
from rapidformer_templates.run.push_to_hub import write_card
from rapidformer_templates.run.receipts import Receipts
from rapidformer_templates.run.replica_check import replica_check_of
from rapidformer_templates.run.run import Position, Template, begin_run
from rapidformer_templates.run.saving import check_base, check_settings, checkpoint_to_load, restore_engine
from rapidformer_templates.run.scripts import CALL
from rapidformer_templates.run.step_errors import MAY_HELP, explain_parameters, locate_device_errors, locate_non_finite
from rapidformer_templates.run.watch import EVALUATION, EXPORT, OWN_CODE, SAVE, SETUP, STEP
from rapidformer_templates.system import accelerator, launch
from rapidformer_templates.system.process_state import seed_all
from rapidformer_templates.system.workers import Workers, broadcast, join

SESSION_FLAGS = frozenset(
    {
        "config", "template", "nproc_per_node", "data_parallel_size", "master_port", "worker_timeout", "device",
        "micro_batch_size", "global_batch_size", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "layerwise_lr_decay", "ema_decay", "clip_grad", "train_iters", "seed", "lr", "seq_length", *OF_SCHEDULES,
    }
)  # fmt: skip
"""Flags, apart from those of the switches, that work without the library's loop, data and run folder."""


@dataclass(frozen=True)
class Evaluation:
    """The result of :meth:`Session.evaluate`.

    Attributes:
        loss: mean over the targets of all workers' batches.
        targets: number of these targets. Use it as the weight of each loss when you average several calls.
        output: the model output for this worker's batch. None if another worker has the last pipeline stage.
    """

    loss: float
    targets: float
    output: Any


def open_session(
    template: Template, schedule: Schedule | None, example: Batch | None, *, reads_flags: bool = False
) -> Session:
    """Open the session of this worker. A process that starts workers waits for them, and exits with them.

    Args:
        reads_flags: the script itself reads the flags that have no effect in a session.

    Raises:
        ConfigError: a flag has no effect in a session.
        Refused: the flags break rules.
        SystemExit: the workers that this process started have finished, or one has failed. Its status is theirs.
    """
    if not reads_flags:
        _check_flags(template, schedule)
    if not accelerator.is_available(template.plan.device):
        raise ConfigError(no_device(template.plan.device), where=template.config.origin("device"))
    count = template.config.launch.nproc_per_node or 1
    if launch.is_worker():
        if CALL in os.environ:
            raise ConfigError("compose() comes before a fit() in the same script", hint="split them into two scripts")
        launch.report_uncaught()
    elif count > 1:
        command = launch.program_command()
        _show(template)
        try:
            launch.run_workers(command, count, template.config.launch.master_port, chosen_layout(template.config))
        except Explained as error:
            print(error, file=sys.stderr)
            raise SystemExit(error.exit_status) from None
        raise SystemExit(0)
    return Session(template, schedule, example)


def _check_flags(template: Template, schedule: Schedule | None) -> None:
    """Raise an error for flags that have no effect in a session."""
    config, plan = template.config, template.plan
    of_a_run = {f.name for section in SECTIONS.values() for f in fields(section)} - SESSION_FLAGS
    ordering = {name for s in (REGISTRY[name] for name in plan.switches) if s.order for name in s.on}
    for name in config.origins:
        if name in of_a_run | ordering and config.get(name) is not None:
            raise _no_effect(name, config)
    steps = config.training.train_iters
    if isinstance(steps, Epochs):
        message = f"--train-iters {steps} has no number of steps, because this loop has its own data"
        hint = "give the number of steps that you will make"
        raise ConfigError(message, where=config.origin("train_iters"), hint=hint)
    shaping = [name for name in OF_SCHEDULES if name in config.origins and name != "lr"]
    if shaping and (schedule is not None or steps is None):
        why, hint = "a schedule must know its end", "give --train-iters, the number of steps that you will make"
        if schedule:
            why, hint = "you pass your own schedule", "leave out one of them"
        message = f"{spelling(shaping[0])} has nothing to act on: {why}"
        raise ConfigError(message, where=config.origin(shaping[0]), hint=hint)


def _no_effect(name: str, config: RunConfig) -> ConfigError:
    message = f"{spelling(name)} acts on the library's own loop, data or run folder, and this loop is yours"
    hint = "leave it out, or train by a template (docs/white-box.md)"
    return ConfigError(message, where=config.origin(name), hint=hint)


def _show(template: Template) -> None:
    prepare_switches(template.config, template.plan)
    show_plan(template.plan)


P = ParamSpec("P")
R = TypeVar("R")


def _in_phase(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method of a session. The watch knows that the worker is in this phase until it returns."""

    def decorated(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            session = cast("Session", args[0])
            watch = session._run.watch
            before = OWN_CODE if watch.phase == SETUP else watch.phase, watch.step
            watch.calls += 1
            watch.enter(phase, session.steps)
            try:
                return method(*args, **kwargs)
            finally:
                watch.enter(*before)

        return wrapper

    return decorated


class Session:
    """An engine with its model, for your own training loop. Create it with :func:`rapidformer_templates.compose`.

    All workers make the same calls in the same order, each with its own batches. Workers of one replica (tensor and
    pipeline parallelism) must pass the same batches: take the share ``session.workers.data_rank`` of
    ``session.workers.data``.

    Attributes:
        model: the model as prepared by the engine.
        plan: the effect of the switches.
        workers: this process and its peers.
    """

    def __init__(self, template: Template, schedule: Schedule | None, example: Batch | None) -> None:
        config = template.config
        self.plan = template.plan
        choose_allocation(self.plan)
        self._stack = ExitStack()
        self.workers: Workers = self._stack.enter_context(join(self.plan.device, self.plan.sizes))
        resolve = partial(resolve_plan, type(template), training=False)
        self._explain_errors = partial(out_of_memory.explained, config, self.plan, self.workers.rank, resolve)
        atexit.register(self.close)
        if self.workers.is_main and launch.CHECKED not in os.environ:
            _show(template)
        self.workers.barrier()
        self._run = run = begin_run(template, self.workers)
        run.data = Data(train=None if example is None else [example], collate=lambda batches: batches[0])
        with self._explain_errors():
            build_engine(run)
        self.model: nn.Module = run.model
        if "seq_length" in config.origins and not has_chosen_frequencies(self.model):
            raise _no_effect("seq_length", config)
        seed_all(config.training.seed + 1 + self.workers.stream)
        if self.workers.world > 1:  # a single process may wait for its user, as in a notebook
            timeout, hint = config.launch.worker_timeout, "continue from your last checkpoint"
            self._stack.enter_context(run.watch.running(self.workers, timeout, None, lambda: hint))
        if schedule is None and isinstance(config.training.train_iters, int):
            schedule = template.build_scheduler(config.training.train_iters)
        self._schedule = checked_schedule(schedule or (lambda step: 1.0))
        assembly = run.engine.assembly
        base = assembly.base.identity if assembly.base else None
        run.position = Position(base=base, settings=assembly.settings)
        self._meter = Meter(self.workers.device)
        self._receipts = Receipts(run)
        self._replica_check = replica_check_of(run)
        self._placeholder: Batch | None = None  # last batch of a step, or of an evaluation before the first step

    @property
    def steps(self) -> int:
        """Number of completed optimizer steps, including those before :meth:`load`."""
        return self._run.position.step

    @property
    def share(self) -> float:
        """Fraction of the peak learning rate in the next step."""
        return self._schedule(self.steps)

    def step(self, batches: Sequence[Batch], share: float | Callable[[], float] | None = None) -> StepResult:
        """Run one optimizer step: forward and backward of the micro batches, clipping, update.

        Uses the gradient of the mean loss over the targets of all workers' micro batches, as in a single process.

        Args:
            batches: the micro batches of this worker, at most ``plan.sizes.accumulation``. A worker with fewer samples
                than others passes fewer, or none.
            share: fraction of the peak learning rate, or a function that returns it right before the update. By
                default it follows the schedule.

        Raises:
            DataError: a worker passes too many batches, or none although it has no earlier batch as a placeholder. No
                worker has made the step.
            NonFiniteLoss: loss or gradient is infinite or NaN. The weights are as before the step.
            SwitchDidNothing: raised after the first step. Names the switches.
        """
        with self.open_step(batches) as step:
            return step.run(self.share if share is None else share)

    @contextmanager
    def open_step(self, batches: Sequence[Batch]) -> Iterator[Step]:
        """Context for an optimizer step whose parts you call yourself. A step without an update does not count.

        Raises:
            DataError, NonFiniteLoss, SwitchDidNothing: see :meth:`step`.
        """
        self._run.watch.calls += 1
        self._run.watch.enter(STEP, self.steps + 1)
        microbatches, problem = self._as_micro_batches(list(batches), self.plan.sizes.accumulation)
        exchanged = self._exchange(microbatches, problem)
        first = self._meter.steps == 0
        if first:
            self._check_replicas(microbatches)
        watching = self._receipts.watch(microbatches) if first else nullcontext()
        step: Step | None = None
        try:
            with (
                self._locate_errors(self.steps),
                watching,
                self._run.engine.step(microbatches, exchanged["targets"]) as step,
            ):
                yield step
        finally:
            if step is not None and step.result is not None:  # also if the caller's code fails after the update
                self._receipts.count(microbatches)
                self._placeholder = batches[-1] if batches else self._placeholder
                self._meter.step(*self._run.position.advance(exchanged))
            self._run.watch.enter(OWN_CODE, self.steps)
        if first and step.result is not None:
            self._receipts.check()

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor from all replicas of the model, as :meth:`Trainer.gather` does, in a loss."""
        return gather_rows(rows, self.workers)

    @_in_phase(EVALUATION)
    def evaluate(self, batch: Batch | None) -> Evaluation:
        """Compute the loss of the workers' batches without gradients. Training is not affected.

        Args:
            batch: the batch of this worker, or None if it has none left.

        Raises:
            DataError: see :meth:`step`.
        """
        microbatches, problem = self._as_micro_batches([] if batch is None else [batch], 1)
        targets = self._exchange(microbatches, problem)["targets"]
        (microbatch,) = microbatches
        self._raise_pending_errors()
        with self._meter.paused(), evaluating(self._run.engine.model), self._run.engine.averaged():
            loss, output = self._run.engine.eval_batch(microbatch)
        self._placeholder = batch if self._placeholder is None else self._placeholder
        (total,) = self.workers.sum(float(loss) if self.workers.is_replica_leader else 0.0)
        return Evaluation(total / (targets or 1.0), targets, output if self.workers.ends_pipeline else None)

    @_in_phase(SAVE)
    def save(self, folder: str | Path, state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint to ``checkpoints/step-N`` in the folder. Any layout can load it.

        Args:
            state: values that your loop needs to resume, such as its epoch. They must be plain values for JSON.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written, or ``state`` of a worker cannot be stored. Earlier
                checkpoints are unchanged.
            ReplicasDiffer: workers have different values where all must have the same.
        """
        lossy = next(filter(None, self.workers.gather(_lossy_part({} if state is None else state, "state"))), None)
        if lossy:
            hint = "give plain values: names to numbers, strings, lists and dicts of them"
            raise CheckpointError(f"a checkpoint does not keep {lossy}", where="session.save(folder, state)", hint=hint)
        self._raise_pending_errors()
        root = RunFolder(folder).checkpoints
        with self._meter.paused():
            if self._replica_check:
                self._replica_check.compare()
            if self.workers.is_main:
                root.mkdir(parents=True, exist_ok=True)
                checkpoint.leave_later(root, self.steps)
            self.workers.barrier()
            progress = {**self._run.position.to_state(), "own": dict(state or {})}
            return checkpoint.save(root, self.steps, self._run.engine, progress, self.workers)

    @_in_phase(SETUP)
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Load a checkpoint, or the newest complete one in a folder. Any layout may have written it.

        A checkpoint of ``fit()`` restores weights, optimizer and step, but not the order of its data.

        Returns:
            The ``state`` that was saved with it.

        Raises:
            CheckpointError: there is none, or it does not fit the model or the optimizer.
        """
        reader = checkpoint.Reader(checkpoint_to_load(Path(folder), self.workers))
        position, state = self._run.position, reader.state
        check_base(reader, position.base)
        check_settings(reader, position.settings)
        restore_engine(reader, self._run.engine, self._run.config, self.workers)
        position.step, position.samples, position.tokens = int(state["step"]), state["samples"], state["tokens"]
        return dict(state.get("own", {}))

    @_in_phase(EXPORT)
    def export(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write a folder that ``from_pretrained`` of transformers can load."""
        self._raise_pending_errors()
        export_model(self._run.engine, tokenizer, Path(folder), partial(write_card, self._run.config, self._run.plan))
        self.workers.barrier()

    def summary(self) -> Summary:
        """Return the part of a run's ``summary.json`` about its steps, with the receipts of the switches."""
        self._raise_pending_errors()
        receipts = self._receipts.measured_by_rank() if self._meter.steps else {}
        return what_was_done(self._run, self._meter, receipts)

    @_in_phase(EVALUATION)
    def forward(self, *arguments: object, **named: object) -> Any:
        """Return the model output in evaluation mode, without gradients or side effects.

        Call it on every worker, in the same order. The weights are those in training, not their averages.
        """
        nothing, engine = MicroBatch((arguments, named), [], idle=True), self._run.engine
        with evaluating(engine.model):
            return engine.eval_batch(nothing, lambda model, batch: model(*batch[0], **batch[1]))[1]

    @_in_phase(EVALUATION)
    @torch.no_grad()
    def generate(self, **arguments: object) -> Any:
        """Return the result of the ``generate`` of a transformers model, in evaluation mode.

        Call it on every worker, each with its own prompts. Workers that divide the parameters wait for each other until
        the longest text is complete. Sampling advances torch's random state, which :meth:`save` stores: each call draws
        other tokens, and so do workers of other replicas. The workers of one replica draw the same.

        Raises:
            ConfigError: a pipeline has no whole model on any worker.
        """
        if self.plan.sizes.pipeline > 1:
            message = "a pipeline cannot generate texts, because no worker has the whole model"
            hint = "divide the model by tensor parallelism or FSDP instead"
            raise ConfigError(message, where="session.generate()", hint=hint)
        if self.workers.context > 1:
            arguments["use_cache"] = False  # each worker would keep the keys of its part only
        model, watch = cast("Any", self.model), self._run.watch
        beat = self.model.register_forward_pre_hook(lambda *_: watch.enter(EVALUATION, self.steps))
        try:
            with in_eval_mode(self.model), self.precision():
                return model.generate(synced_gpus=self.workers.world > 1, **arguments)
        finally:
            beat.remove()

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context in which ``compute_loss`` runs. Use it for a loss in your own loop."""
        return self._run.engine.precision()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the underlying optimizer, for reading only."""
        return self._run.engine.optimizer.param_groups

    def close(self) -> None:
        """Disconnect once all workers are done. A ``with`` block does so when it ends."""
        atexit.unregister(self.close)
        self.workers.barrier()  # wait until the last exchange is done everywhere
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        atexit.unregister(self.close)
        if self.workers.world == 1:
            self._stack.close()  # otherwise the launcher reports the error to peers, which may be waiting
        try:
            with self._explain_errors():
                raise error
        except OutOfMemory:
            raise
        except BaseException:
            return  # the original error propagates

    def _as_micro_batches(self, batches: list[Batch], count: int) -> tuple[list[MicroBatch], str | None]:
        """Return (the micro batches, as many as on every worker, None), or ([], the reason why there are none)."""
        if len(batches) > count:
            return [], (
                f"{len(batches)} micro batches where a step has {count}: --global-batch-size is "
                f"{self.plan.sizes.global_batch} = {count} × {self.plan.sizes.data} workers × --micro-batch-size "
                f"{self.plan.sizes.micro_batch}"
            )
        placeholder = batches[-1] if batches else self._placeholder
        if placeholder is None:
            return [], "no batch, and no earlier one that could be used instead"
        idle = [MicroBatch(placeholder, [], idle=True) for _ in range(count - len(batches))]
        own = [MicroBatch(batch, list(range(int(samples_in(batch))))) for batch in batches]
        name = "samples of this worker's batch"
        return [self._run.with_target_count(microbatch, name) for microbatch in (*own, *idle)], None

    def _exchange(self, microbatches: list[MicroBatch], problem: str | None) -> dict[str, float]:
        """Return targets, samples and tokens of all workers' micro batches.

        Raises:
            DataError: a worker has a problem. Raised on all workers.
        """
        exchanged = self._run.exchange(microbatches, problems=problem is not None)
        if exchanged["problems"]:
            message = next(p for p in self.workers.gather(problem) if p)
            raise DataError(f"a worker passes {message}", where="session")
        return exchanged

    def _check_replicas(self, microbatches: list[MicroBatch]) -> None:
        """Check that the workers of one replica have the same batches. Otherwise they would train different models.

        Raises:
            DataError: the batches differ.
        """
        if self.workers.mesh is None:
            return
        batches = [dict(m.batch) if isinstance(m.batch, Mapping) else m.batch for m in microbatches]
        digest = 0
        for tensor in tree_leaves(batches):
            if isinstance(tensor, torch.Tensor):
                digest = zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest)
        replicas: dict[int, set[int]] = {}
        for replica, worker_digest in self.workers.gather((self.workers.data_rank, digest)):
            replicas.setdefault(replica, set()).add(worker_digest)
        if any(len(worker_digest) > 1 for worker_digest in replicas.values()):
            message = "workers that share a replica of the model pass different batches"
            hint = "take the share session.workers.data_rank of session.workers.data, not that of the rank"
            raise DataError(message, where="session.step(batches)", hint=hint)

    def _raise_pending_errors(self) -> None:
        with self._locate_errors(self.steps - 1):
            self._run.engine.raise_pending_errors()

    @contextmanager
    def _locate_errors(self, newest: int) -> Iterator[None]:
        """Add the step to a :class:`NonFiniteLoss` or a device failure. ``newest`` is the last started step."""
        with locate_non_finite(newest, MAY_HELP), locate_device_errors(lambda: newest), explain_parameters(self.plan):
            yield


def _lossy_part(value: object, name: str) -> str | None:
    """Return the path of the first part of a value that JSON does not preserve. A tuple may become a list."""
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            return f"the key {odd!r} of {name}, of type {type(odd).__name__}"
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{name}[{place}]": part for place, part in enumerate(value)}
    elif value is None or type(value) in (bool, int, float, str):
        return None
    else:
        return f"{name}, of type {type(value).__name__}"
    return next(filter(None, (_lossy_part(part, place) for place, part in parts.items())), None)


def built_on_each_worker(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model that a function builds, or a given model with the weights and buffers of rank 0."""
    if not isinstance(model, nn.Module):
        return model()
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor.data)
    return model
