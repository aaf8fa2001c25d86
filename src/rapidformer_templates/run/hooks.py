"""The hooks of a user's template, and checks of the values that they return.

An error names the hook that returned an unusable value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from rapidformer_templates.data.checks import kind_of
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.recipe import OptimizerSpec, Schedule
from rapidformer_templates.errors import ModelError, RapidformerError


class Hooks(Protocol):
    """The part of a :class:`rapidformer_templates.Trainer` that a run calls. ``Trainer`` documents each member."""

    tokenizer: Any
    uses_task: bool

    @property
    def task(self) -> Task: ...

    def build_model(self) -> nn.Module: ...
    def build_data(self) -> Data: ...
    def compute_loss(self, model: Any, batch: Batch) -> Any: ...
    def count_targets(self, batch: Batch) -> float: ...
    def build_optimizer(self) -> OptimizerSpec: ...
    def build_scheduler(self, total_steps: int) -> Schedule: ...
    def read_outputs(self, outputs: Any, batch: Batch) -> tuple[Sequence[Any], Sequence[Any]]: ...
    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]: ...

    def on_train_start(self) -> None: ...
    def on_step_end(self, step: int, result: StepResult) -> None: ...
    def on_epoch_end(self, epoch: int) -> None: ...
    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, step: int, folder: Path) -> None: ...
    def on_train_end(self, summary: Mapping[str, Any]) -> None: ...


def checked_model(model: object) -> nn.Module:
    """Return the result of ``build_model`` if it is valid.

    Raises:
        ModelError: it is not a module.
    """
    if isinstance(model, nn.Module):
        return model
    raise ModelError(
        f"build_model returned {kind_of(model)}", where="build_model()", hint="return the model, a torch.nn.Module"
    )


def checked_optimizer(recipe: object) -> OptimizerSpec:
    """Return the result of ``build_optimizer`` if it is valid.

    Raises:
        RapidformerError: it is not an optimizer recipe.
    """
    if isinstance(recipe, OptimizerSpec):
        return recipe
    instance = " (parameters are sharded before there is an instance)" if hasattr(recipe, "param_groups") else ""
    raise RapidformerError(
        f"build_optimizer returned {kind_of(recipe)}",
        where="build_optimizer()",
        hint=f"return a recipe{instance}: OptimizerSpec(torch.optim.AdamW, {{'lr': …}})",
    )


def checked_schedule(schedule: object) -> Schedule:
    """Return the result of ``build_scheduler`` if it is valid.

    Raises:
        RapidformerError: it is not a function from a step to a number.
    """
    hint = "return a function from the step (from 0) to a share of the peak learning rate"
    if not callable(schedule):
        raise RapidformerError(
            f"build_scheduler returned {kind_of(schedule)}", where="build_scheduler(total_steps)", hint=hint
        )
    factor = schedule(0)
    if not is_number(factor) or not math.isfinite(factor):
        shown = factor if is_number(factor) else kind_of(factor)
        raise RapidformerError(
            f"the schedule's share of the first step is {shown}", where="build_scheduler(total_steps)", hint=hint
        )
    function: Schedule = schedule
    return function


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a single number: a Python or numpy number, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) or (hasattr(value, "__float__") and getattr(value, "size", 1) == 1)


def checked_count(count: object) -> float:
    """Return the result of ``count_targets`` if it is valid.

    Raises:
        RapidformerError: it is not a number, or it is negative.
    """
    if is_number(count) and count >= 0:
        number: float = count
        return number
    raise RapidformerError(
        f"count_targets returned {count if is_number(count) else kind_of(count)}",
        where="count_targets(batch)",
        hint="return the number of targets that the loss of the batch is a mean over",
    )


def checked_predictions(result: object, samples: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the result of ``read_outputs`` for a batch of ``samples`` samples if it is valid.

    Raises:
        RapidformerError: it is not a pair with one prediction and one reference per sample.
    """
    hint = "return (predictions, references), one entry per sample, on the host"
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not all(isinstance(part, Sized) for part in result):
        raise RapidformerError(
            f"read_outputs returned {kind_of(result)}", where="read_outputs(outputs, batch)", hint=hint
        )
    predictions, references = result
    if len(predictions) != samples or len(references) != samples:
        raise RapidformerError(
            f"read_outputs returned {len(predictions)} predictions and {len(references)} references "
            f"for a batch of {samples} samples",
            where="read_outputs(outputs, batch)",
            hint=hint,
        )
    return predictions, references


def checked_metrics(metrics: object) -> dict[str, float]:
    """Return the result of ``compute_metrics`` as floats. None means that there are no metrics.

    Raises:
        RapidformerError: it is not a mapping of names to numbers.
    """
    hint = "return a mapping of names to numbers"
    where = "compute_metrics(predictions, references)"
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise RapidformerError(f"compute_metrics returned {kind_of(metrics)}", where=where, hint=hint)
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_number(value):
            raise RapidformerError(f"compute_metrics returned {kind_of(value)} as {name}", where=where, hint=hint)
    return {name: float(value) for name, value in metrics.items()}
