"""The recipe of an optimizer that a script has made already: engines shard the parameters first, and build it anew."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rapidformer_templates.engines.recipe import OptimizerSpec, Schedule
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.models.blocks import canonical_name

WHERE = "compose(model, optimizer, …)"
TAKES_OPTIONS = (type, partial)
"""What has no options of its own, or not all of them."""
AS_RECIPE = "give a recipe: OptimizerSpec(torch.optim.AdamW, {'lr': …}), or the class itself"


def as_recipe(
    optimizer: OptimizerSpec | Optimizer | Callable[..., Optimizer], model: object, options: Mapping[str, Any]
) -> OptimizerSpec:
    """The recipe that a recipe, a class, a function from parameter groups or an optimizer stands for.

    Args:
        model: the module that an optimizer was made for.
        options: for a class, those that it is to have; they win over those of a partial one.

    Raises:
        ConfigError: it cannot be built anew as it is.
    """
    if isinstance(optimizer, type):
        return OptimizerSpec(optimizer, options)
    if isinstance(optimizer, partial):
        return OptimizerSpec(optimizer.func, {**optimizer.keywords, **options})
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return _recipe_of(optimizer, model)
    if callable(optimizer):
        return OptimizerSpec(optimizer)
    raise ConfigError(f"the optimizer is of type {type(optimizer).__name__}", where=WHERE, hint=AS_RECIPE)


def _recipe_of(optimizer: Optimizer, model: object) -> OptimizerSpec:
    """The class of an optimizer, its options, and those of its groups for the parameters by their names."""
    kind = type(optimizer)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the {kind.__name__} was made for parameters of no known model", where=WHERE,
            hint="give the model itself beside it, not a function that builds one; or " + AS_RECIPE,
        )  # fmt: skip
    if optimizer.state:
        raise ConfigError(
            f"the {kind.__name__} has made steps already, and its state cannot be divided", where=WHERE,
            hint="compose before the first step; session.load() takes up what session.save() has written",
        )  # fmt: skip
    takes = list(inspect.signature(kind).parameters.values())[1:]
    missing = [p.name for p in takes if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [name for name in missing if name not in optimizer.defaults]
    if missing:
        raise ConfigError(f"nothing tells the {', '.join(missing)} of the {kind.__name__}", where=WHERE, hint=AS_RECIPE)
    known = {parameter.name for parameter in takes}
    kwargs = {name: value for name, value in optimizer.defaults.items() if name in known}
    return OptimizerSpec(kind, kwargs, _by_name(optimizer, model))


def _by_name(optimizer: Optimizer, model: nn.Module) -> Callable[[str, nn.Parameter], Mapping[str, Any]]:
    """The options in which each parameter's group differs from the optimizer's defaults."""
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    different: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        values = {**group, "lr": group.get("initial_lr", group.get("lr"))}  # a scheduler of torch has changed it
        own = {k: v for k, v in values.items() if k in optimizer.defaults and v != optimizer.defaults[k]}
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"the {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that the model "
                    "does not have", where=WHERE, hint="make the optimizer of the parameters of this very model",
                )  # fmt: skip
            different[names[id(parameter)]] = own
    trained = [canonical_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    left_out = [name for name in trained if name not in different]
    if left_out:
        raise ConfigError(
            f"the {type(optimizer).__name__} leaves out {len(left_out)} parameters that require a gradient: "
            f"{', '.join(left_out[:6])}", where=WHERE, hint="set requires_grad = False for what is not to be trained",
        )  # fmt: skip
    return lambda name, parameter: different.get(name, {})  # what a switch has added takes the defaults


def as_schedule(schedule: Schedule | LRScheduler | Callable[[Optimizer], LRScheduler]) -> Schedule:
    """The schedule that a scheduler of torch stands for, whose optimizer never steps; others are left as they are.

    Raises:
        ConfigError: it is none of steps alone, or its groups have different shares.
    """
    if not isinstance(schedule, LRScheduler):
        return schedule  # type: ignore[return-value]
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau goes by a metric, not by the step", where="schedule",
            hint="give the share of each step: session.step(batches, share=…)",
        )  # fmt: skip
    peaks = [float(group["initial_lr"]) for group in schedule.optimizer.param_groups]
    shares: list[float] = []

    def share(step: int) -> float:
        while len(shares) <= step:
            if shares:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of an optimizer that has not stepped
                    schedule.step()
            now = {float(rate) / peak for rate, peak in zip(schedule.get_last_lr(), peaks, strict=True) if peak}
            if max(now, default=1.0) - min(now, default=1.0) > 1e-12:
                raise ConfigError(f"the scheduler has different shares for its groups: {sorted(now)}", where="schedule")
            shares.append(max(now, default=1.0))
        return shares[step]

    return share
