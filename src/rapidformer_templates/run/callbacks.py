"""Callbacks as objects. Several templates can share them, and checkpoints save their state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rapidformer_templates.data.checks import kind_of
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.errors import CheckpointError, ConfigError, alike
from rapidformer_templates.run.script_hooks import CALLED_BY_A_LOOP
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers


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
            raise ConfigError(
                f"callbacks[{number}] is {what}, not a Callback object",
                where=where,
                hint=hint if is_class else "derive its class from rapidformer_templates.Callback",
            )
        for name in dir(callback):
            if CALLED_BY_A_LOOP.match(name) and name not in EVENTS and callable(getattr(callback, name)):
                (near,) = alike(name, EVENTS, limit=1, cutoff=0.0)
                what = f"{type(callback).__name__}.{name} is not a callback, so nothing would call it"
                raise ConfigError(what, where=where, hint=f"did you mean {near}?")
    return tuple(callbacks)


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
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
            raise CheckpointError(
                "the state of a callback cannot be saved",
                where=f"{name}.state_dict()",
                hint="return a dict of plain values: names to numbers, strings, lists and dicts of them",
            )
    return {name: state for name, state in states.items() if state}


def restore_callbacks(callbacks: Sequence[Callback], saved: Mapping[str, Any], workers: Workers) -> None:
    """Restore each callback's state from a checkpoint. Callbacks without a saved state start fresh."""
    named = dict(_named(callbacks))
    dropped, new = sorted(saved.keys() - named.keys()), sorted(states_of(callbacks).keys() - saved.keys())
    load_callback_states(callbacks, saved)
    if dropped:
        say(
            workers,
            f"the checkpoint has a state of {', '.join(dropped)}, which this run does not have: it is lost",
            loud=True,
        )
    if new:
        say(workers, f"the checkpoint has no state of {', '.join(new)}: starting afresh", loud=True)


def load_callback_states(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> None:
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
