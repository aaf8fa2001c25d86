"""The hooks of a user's template, callbacks as objects, and checks of the values that both return.

An error names the hook that returned an unusable value. Several templates can share callback objects, and checkpoints
save their state.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.types import Batch, Data, kind_of
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.recipe import OptimizerSpec, Schedule
from rapidformer_templates.errors import CheckpointError, ConfigError, ModelError, RapidformerError, alike
from rapidformer_templates.run.scripts import CALLED_BY_A_LOOP, accepts
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers


class Hooks(Protocol):
    """The part of a :class:`rapidformer_templates.Trainer` that a run calls. ``Trainer`` documents each member."""

    tokenizer: PreTrainedTokenizerBase | None
    uses_task: bool

    @property
    def task(self) -> Task: ...

    def build_model(self) -> nn.Module: ...
    def build_data(self) -> Data: ...
    def compute_loss(self, model: Any, batch: Batch) -> Any: ...
    def count_targets(self, batch: Batch) -> float: ...
    def build_optimizer(self) -> OptimizerSpec: ...
    def build_scheduler(self, total_steps: int) -> Schedule: ...
    def read_outputs(self, outputs: object, batch: Batch) -> tuple[Sequence[object], Sequence[object]]: ...
    def compute_metrics(self, predictions: Sequence[object], references: Sequence[object]) -> Mapping[str, float]: ...

    def on_train_start(self) -> None: ...
    def on_step_end(self, step: int, result: StepResult) -> None: ...
    def on_epoch_end(self, epoch: int) -> None: ...
    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, step: int, folder: Path) -> None: ...
    def on_train_end(self, summary: Mapping[str, object]) -> None: ...


def unusable(returned: str, where: str, hint: str, kind: type[RapidformerError] = RapidformerError) -> RapidformerError:
    """Return the error for what a hook has returned.

    Args:
        returned: describes the value.
        where: the call of the hook.
    """
    return kind(f"{where.partition('(')[0]} returned {returned}", where=where, hint=hint)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a single number: a Python or numpy number, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) or (hasattr(value, "__float__") and getattr(value, "size", 1) == 1)


def checked_model(model: object) -> nn.Module:
    """Return the result of ``build_model`` if it is a module."""
    if isinstance(model, nn.Module):
        return model
    raise unusable(kind_of(model), "build_model()", "return the model, a torch.nn.Module", ModelError)


def checked_optimizer(recipe: object) -> OptimizerSpec:
    """Return the result of ``build_optimizer`` if it is an optimizer recipe."""
    if isinstance(recipe, OptimizerSpec):
        return recipe
    instance = " (parameters are sharded before there is an instance)" if hasattr(recipe, "param_groups") else ""
    hint = f"return a recipe{instance}: OptimizerSpec(torch.optim.AdamW, {{'lr': …}})"
    raise unusable(kind_of(recipe), "build_optimizer()", hint)


def checked_schedule(schedule: object) -> Schedule:
    """Return the result of ``build_scheduler`` if it is a function from a step to a number."""
    where = "build_scheduler(total_steps)"
    hint = "return a function from the step (from 0) to a share of the peak learning rate"
    if not callable(schedule) or isinstance(schedule, type):
        raise unusable(kind_of(schedule), where, hint)
    share = schedule(0)
    if not is_number(share) or not math.isfinite(share):
        shown = share if is_number(share) else kind_of(share)
        raise RapidformerError(f"the schedule's share of the first step is {shown}", where=where, hint=hint)
    function: Schedule = schedule
    return function


def checked_count(count: object) -> float:
    """Return the result of ``count_targets`` if it is a number that is not negative."""
    if is_number(count) and count >= 0:
        number: float = count
        return number
    hint = "return the number of targets that the loss of the batch is a mean over"
    raise unusable(str(count) if is_number(count) else kind_of(count), "count_targets(batch)", hint)


def checked_predictions(result: object, samples: int) -> tuple[Sequence[object], Sequence[object]]:
    """Return the result of ``read_outputs`` if it has one prediction and one reference for each of the samples."""
    where, hint = "read_outputs(outputs, batch)", "return (predictions, references), one entry per sample, on the host"
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not all(isinstance(part, Sized) for part in result):
        raise unusable(kind_of(result), where, hint)
    predictions, references = result
    if len(predictions) != samples or len(references) != samples:
        found = f"{len(predictions)} predictions and {len(references)} references for a batch of {samples} samples"
        raise unusable(found, where, hint)
    return predictions, references


def checked_metrics(metrics: object) -> dict[str, float]:
    """Return the result of ``compute_metrics``, names with numbers, as floats. None means that there are no metrics."""
    where, hint = "compute_metrics(predictions, references)", "return a mapping of names to numbers"
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise unusable(kind_of(metrics), where, hint)
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_number(value):
            raise unusable(f"{kind_of(value)} as {name}", where, hint)
    return {name: float(value) for name, value in metrics.items()}


class Callback:
    """Base class of callbacks. Derive from it, and pass objects to ``callbacks=[…]``.

    The methods are the callbacks of a template, with the template as an additional first argument. They run on every
    worker, after the template's own callbacks, in the order of the list. ``trainer`` has ``config``, ``plan``, ``data``
    and ``model``.
    """

    def on_train_start(self, trainer: Any) -> None:
        """Called before the first step of this process. A resumed run calls :meth:`load_state_dict` first."""

    def on_step_end(self, trainer: Any, step: int, result: StepResult) -> None:
        """Called after each optimizer step. ``step`` counts from 1."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Called after the last step of each epoch in a run whose length is given in epochs."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_checkpoint(self, trainer: Any, step: int, folder: Path) -> None:
        """Called after a checkpoint has been written."""

    def on_train_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        """Called after the last step, evaluation and export."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values, the same on every worker. The state of rank 0 is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. A resumed run calls this on every worker."""


CallbackStates = dict[str, dict[str, Any]]
"""The states of callbacks, plain values, by the names of the callbacks."""

EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def checked_callbacks(callbacks: Sequence[object]) -> tuple[Callback, ...]:
    """Return the value of ``callbacks=`` as a tuple if it is valid.

    Raises:
        ConfigError: an item is not an instance of :class:`Callback`, or has a method that nothing would call.
    """
    where, hint = "callbacks", "give a list of objects: callbacks=[MyCallback(), …]"
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks is {kind_of(callbacks)}", where=where, hint=hint)
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type)
            what = f"the class {callback.__name__}" if is_class else kind_of(callback)
            hint = hint if is_class else "derive its class from rapidformer_templates.Callback"
            raise ConfigError(f"callbacks[{number}] is {what}, not a Callback object", where=where, hint=hint)
        for name in dir(callback):
            if CALLED_BY_A_LOOP.match(name) and name not in EVENTS and callable(getattr(callback, name)):
                (near,) = alike(name, EVENTS, limit=1, cutoff=0.0)
                what = f"{type(callback).__name__}.{name} is not a callback, so nothing would call it"
                raise ConfigError(what, where=where, hint=f"did you mean {near}?")
        for name in EVENTS:
            given = list(signature(getattr(Callback, name)).parameters)
            if not accepts(getattr(callback, name), given[1:]):
                what = f"{type(callback).__name__}.{name} does not take the arguments of a callback"
                raise ConfigError(what, where=where, hint=f"declare it as def {name}({', '.join(given)})")
    return tuple(callbacks)


def states_of(callbacks: Sequence[Callback]) -> CallbackStates:
    """Return the state of each callback that has one, by its name.

    Raises:
        CheckpointError: a state contains values that a checkpoint cannot store unchanged.
    """
    states = {name: callback.state_dict() for name, callback in _named(callbacks)}
    for name, state in states.items():
        try:
            is_plain = isinstance(state, dict) and repr(json.loads(json.dumps(state))) == repr(state)
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            hint = "return a dict of plain values: names to numbers, strings, lists and dicts of them"
            raise CheckpointError("the state of a callback cannot be saved", where=f"{name}.state_dict()", hint=hint)
    return {name: state for name, state in states.items() if state}


def restore_callbacks(callbacks: Sequence[Callback], saved: CallbackStates, workers: Workers) -> None:
    """Restore each callback's state from a checkpoint. Callbacks without a saved state start fresh."""
    named = dict(_named(callbacks))
    dropped, new = sorted(saved.keys() - named.keys()), sorted(states_of(callbacks).keys() - saved.keys())
    load_callback_states(callbacks, saved)
    if dropped:
        line = f"the checkpoint has a state of {', '.join(dropped)}, which this run does not have: it is lost"
        say(workers, line, loud=True)
    if new:
        say(workers, f"the checkpoint has no state of {', '.join(new)}: starting afresh", loud=True)


def load_callback_states(callbacks: Sequence[Callback], states: CallbackStates) -> None:
    """Load the states from the workers that this process started into its own callbacks."""
    for name, callback in _named(callbacks):
        if name in states:
            callback.load_state_dict(states[name])


def _named(callbacks: Sequence[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yield callbacks with the names of their classes, numbered if a class occurs several times."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__qualname__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}-{counts[name]}"), callback
