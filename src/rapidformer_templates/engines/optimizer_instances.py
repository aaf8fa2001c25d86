"""Convert an optimizer instance of a script to a recipe. Engines shard the parameters first, then build it again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.recipe import GroupOptions, OptimizerSpec, Schedule, trained_parameters
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.models.blocks import canonical_name

WHERE = "compose(model, optimizer, …)"
TAKES_OPTIONS = (type, partial)
"""Factories without options, or with only some of them."""
AS_RECIPE = "give a recipe: OptimizerSpec(torch.optim.AdamW, {'lr': …}), or the class itself"

MARKS = frozenset({"params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Keys of a parameter group that are not options: its parameters, and values that torch schedulers store."""
AHEAD = 10_000
"""Maximum number of steps of a scheduler that are checked before the first step."""


def as_recipe(
    optimizer: OptimizerSpec | Optimizer | Callable[..., Optimizer], model: object, options: Mapping[str, object]
) -> OptimizerSpec:
    """Convert a recipe, a class, a function of parameter groups, or an optimizer to a recipe.

    Args:
        model: the module whose parameters an optimizer instance was made for.
        options: keyword arguments for a class. They take precedence over those of a ``partial``.

    Raises:
        ConfigError: an identical optimizer cannot be built again.
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
    raise _error(f"the optimizer is of type {type(optimizer).__name__}")


def _error(message: str, hint: str = AS_RECIPE) -> ConfigError:
    return ConfigError(message, where=WHERE, hint=hint)


def _recipe_of(optimizer: Optimizer, model: object) -> OptimizerSpec:
    """Build a recipe from the class of an optimizer, its defaults, and the group options of each parameter by name."""
    kind: Callable[..., Optimizer] = type(optimizer)
    name = type(optimizer).__name__
    if not isinstance(model, nn.Module):
        hint = "pass the model itself with it, not a function that builds one; or " + AS_RECIPE
        raise _error(f"the {name} was made for the parameters of an unknown model", hint)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        message = f"the {name} has hooks around its step, which would be lost when it is built again"
        raise _error(message, "do what they do before and after session.step(…)")
    _, *parameters = inspect.signature(kind).parameters.values()  # the groups, and the options
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    hint = f"give a function that makes it: lambda groups: {name}(groups, …), with all of its options"
    if missing := [option for option in names if option not in optimizer.defaults]:
        raise _error(f"the {name} does not keep its {', '.join(missing)} in its defaults", hint)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    options = {option: value for option, value in optimizer.defaults.items() if takes_all or option in names}
    groups = [{**group, **_options_of(group)} for group in optimizer.param_groups]
    try:
        again = kind(groups, **options)
    except Exception as error:  # from a user's own class
        raise _error(f"the {name} cannot be built again with {', '.join(options)}: {error}", hint) from error
    _check_equal(optimizer, again, hint)
    return OptimizerSpec(kind, options, _options_by_name(optimizer, model))


def _check_equal(optimizer: Optimizer, again: Optimizer, hint: str) -> None:
    """Refuse an optimizer that differs from the one that was built again."""
    name, both = type(optimizer).__name__, (optimizer, again)
    states, states_again = ([v for v in tree_leaves(one.state_dict()["state"]) if torch.is_tensor(v)] for one in both)
    if len(states) != len(states_again) or not all(map(torch.equal, states, states_again)):
        to_do = "compose before the first step; session.load() restores what session.save() has written"
        raise _error(f"the {name} has already made steps, and its state cannot be divided", to_do)
    options, options_again = ([one.defaults, *map(_options_of, one.param_groups)] for one in both)
    for given, rebuilt in zip(options, options_again, strict=True):
        if given != rebuilt:
            differing = ", ".join(option for option in given if given[option] != rebuilt.get(option))
            raise _error(f"the {name} has another {differing} when it is built again", hint)


def _options_of(group: Mapping[str, object]) -> dict[str, object]:
    """Return the options a group was made with, without the changes that torch schedulers make to it."""
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in group.items() if key not in MARKS}
    return {**options, "lr": group["initial_lr"]} if "initial_lr" in group else options


def _options_by_name(optimizer: Optimizer, model: nn.Module) -> GroupOptions:
    """Map parameter names to the options in which their group differs from the optimizer's defaults."""
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    different: dict[str, dict[str, object]] = {}
    for group in optimizer.param_groups:
        differing = {k: v for k, v in _options_of(group).items() if k not in defaults or v != defaults[k]}
        for parameter in group["params"]:
            if id(parameter) not in names:
                message = f"the {kind} has a parameter of shape {tuple(parameter.shape)} that the model does not have"
                raise _error(message, "build the optimizer from the parameters of this model")
            different[names[id(parameter)]] = differing
    if left_out := [name for name, _ in trained_parameters(model) if name not in different]:
        some = f"{len(left_out)} parameters that require a gradient: {', '.join(left_out[:6])}"
        hint = "set requires_grad = False for parameters that should not be trained"
        raise _error(f"the {kind} leaves out {some}", hint)
    return lambda name, parameter: different.get(name, {})  # parameters that a switch adds use the defaults


def as_schedule(schedule: Schedule | LRScheduler, steps: int | None) -> Schedule:
    """Convert a torch scheduler, whose optimizer never steps, to a schedule. Other schedules are returned unchanged.

    Args:
        steps: number of steps to check immediately. None checks two.

    Raises:
        ConfigError: the scheduler depends on something other than the step, changes something other than the learning
            rate, or scales the rates of its groups differently. Raised immediately, or at a later step.
    """
    if not isinstance(schedule, LRScheduler):
        return schedule
    if isinstance(schedule, ReduceLROnPlateau):
        hint = "give the share of each step: session.step(batches, share=…)"
        raise ConfigError("ReduceLROnPlateau depends on a metric, not on the step", where="schedule", hint=hint)
    share = _RecordedScales(schedule)
    share(min(steps or 2, AHEAD) - 1)
    return share


class _RecordedScales:
    """Records the scale of each step while the scheduler advances, because a session may start at any step."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._groups = scheduler, scheduler.optimizer.param_groups
        self._initial_options = [dict(group) for group in self._groups]
        self._scales = [self._current_scale()]

    def __call__(self, step: int) -> float:
        """Return the share of the peak rate."""
        while len(self._scales) <= step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warning about an optimizer that has not stepped
                self._scheduler.step()
            pairs = zip(self._groups, self._initial_options, strict=True)
            changed = {k for now, then in pairs for k in now.keys() - {"params", "lr"} if now[k] != then.get(k)}
            if changed:
                self._refuse(
                    f"changes {', '.join(sorted(changed))} of the optimizer, too, but a schedule may change only rates",
                    "OneCycleLR and CyclicLR leave momenta alone with cycle_momentum=False",
                )
            self._scales.append(self._current_scale())
        return self._scales[step]

    def _current_scale(self) -> float:
        rates = [(float(group["lr"]), float(group["initial_lr"])) for group in self._groups]
        if any(rate and not peak for rate, peak in rates):
            self._refuse("starts at a rate of zero, so no other rate is a share of it", "start at 1e-12 or so")
        shares = {rate / peak for rate, peak in rates if peak} or {1.0}
        if max(shares) - min(shares) > 1e-9 * max(1.0, abs(max(shares))):
            reason = f"has different shares of their rates for its groups: {sorted(shares)}"
            self._refuse(reason, "give one function for all groups; their peaks may differ")
        return max(shares)

    def _refuse(self, reason: str, hint: str) -> NoReturn:
        raise ConfigError(f"the scheduler {type(self._scheduler).__name__} {reason}", where="schedule", hint=hint)
