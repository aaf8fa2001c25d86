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
    raise ConfigError(f"the optimizer is of type {type(optimizer).__name__}", where=WHERE, hint=AS_RECIPE)


def _recipe_of(optimizer: Optimizer, model: object) -> OptimizerSpec:
    """Build a recipe from the class of an optimizer, its options, and the group options of each parameter by name."""
    kind = type(optimizer)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the {kind.__name__} was made for the parameters of an unknown model", where=WHERE,
            hint="pass the model itself with it, not a function that builds one; or " + AS_RECIPE,
        )  # fmt: skip
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            f"the {kind.__name__} has hooks around its step, which would be lost when it is built again", where=WHERE,
            hint="do what they do before and after session.step(…)",
        )  # fmt: skip
    names, known_values = _constructor_options(kind), {**vars(optimizer), **optimizer.defaults}
    missing = [name for name in names if name not in known_values]
    if missing:
        raise ConfigError(f"cannot tell the {', '.join(missing)} of the {kind.__name__}", where=WHERE, hint=AS_RECIPE)
    recipe = OptimizerSpec(kind, {name: known_values[name] for name in names}, _options_by_name(optimizer, model))
    _check_rebuilds(optimizer, recipe, model)
    return recipe


def _constructor_options(kind: type[Optimizer]) -> list[str]:
    """Return the options of a class. Options that its constructor passes on as keywords belong to the base class."""
    names: list[str] = []
    for base in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[
            2:
        ]  # without self and the groups
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


def _check_rebuilds(optimizer: Optimizer, recipe: OptimizerSpec, model: nn.Module) -> None:
    """Check that the recipe builds an equal optimizer. It does not if the class hides the options it was given.

    Raises:
        ConfigError: the optimizer cannot be built again, or differs in an option.
    """
    name = type(optimizer).__name__
    hint = f"give a function that makes it: lambda groups: {name}(groups, …), with all of its options"
    trained = trained_parameters(model)
    try:
        again = recipe.build(trained, recipe.differences(trained))
    except Exception as error:  # from a user's own class
        message = f"the {name} cannot be built again with {', '.join(recipe.kwargs) or 'no options'}: {error}"
        raise ConfigError(message, where=WHERE, hint=hint) from error
    if not _same_state(optimizer, again):
        raise ConfigError(
            f"the {name} has already made steps, and its state cannot be divided", where=WHERE,
            hint="compose before the first step; session.load() restores what session.save() has written",
        )  # fmt: skip
    of_groups = {id(parameter): group for group in again.param_groups for parameter in group["params"]}
    plain = {key: v for key, v in vars(optimizer).items() if key[0] != "_" and isinstance(v, int | float | str)}
    pairs = [(optimizer.defaults, again.defaults), (plain, vars(again))] + [
        (_options_of(group), of_groups[id(parameter)])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in of_groups  # a frozen parameter is not updated
    ]
    for original, rebuilt in pairs:
        for option, value in original.items():
            if option not in rebuilt or not _equal(rebuilt[option], value):
                became = f"became {rebuilt[option]}" if option in rebuilt else "was lost"
                raise ConfigError(
                    f"{option}={value} of the {name} {became} when it was built again", where=WHERE, hint=hint
                )


def _same_state(optimizer: Optimizer, fresh: Optimizer) -> bool:
    """Whether an optimizer still has its initial state. Most start without state, Adagrad starts with sums."""
    for parameter, state in optimizer.state.items():
        initial = fresh.state.get(parameter, {}) if parameter.requires_grad else state
        if initial.keys() != state.keys() or not all(_equal(value, initial[key]) for key, value in state.items()):
            return False
    return True


def _options_of(group: Mapping[str, object]) -> dict[str, object]:
    """Return the options a group was made with, without the changes that torch schedulers make to it."""
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in group.items() if key not in MARKS}
    return {**options, "lr": group["initial_lr"]} if "initial_lr" in group else options


def _equal(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def _options_by_name(optimizer: Optimizer, model: nn.Module) -> GroupOptions:
    """Map parameter names to the options in which their group differs from the optimizer's defaults."""
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    different: dict[str, dict[str, object]] = {}
    for group in optimizer.param_groups:
        defaults = optimizer.defaults
        differing = {k: v for k, v in _options_of(group).items() if k not in defaults or not _equal(v, defaults[k])}
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"the {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that the model "
                    "does not have", where=WHERE, hint="build the optimizer from the parameters of this model",
                )  # fmt: skip
            different[names[id(parameter)]] = differing
    left_out = [name for name, _ in trained_parameters(model) if name not in different]
    if left_out:
        raise ConfigError(
            f"the {type(optimizer).__name__} leaves out {len(left_out)} parameters that require a gradient: "
            f"{', '.join(left_out[:6])}", where=WHERE,
            hint="set requires_grad = False for parameters that should not be trained",
        )  # fmt: skip
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
        raise ConfigError(
            "ReduceLROnPlateau depends on a metric, not on the step", where="schedule",
            hint="give the share of each step: session.step(batches, share=…)",
        )  # fmt: skip
    share = _RecordedScales(schedule)
    share(min(steps or 2, AHEAD) - 1)
    return share


class _RecordedScales:
    """Records the scale of each step while the scheduler advances, because a session may start at any step."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._groups = scheduler, scheduler.optimizer.param_groups
        self._name = type(scheduler).__name__
        self._initial_options = self._other_options()
        self._scales = [self._current_scale()]

    def __call__(self, step: int) -> float:
        while len(self._scales) <= step:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the warning about an optimizer that has not stepped
                    self._scheduler.step()
            except ValueError as error:  # OneCycleLR raises past its last step
                self._refuse(
                    f"has no rate for step {len(self._scales) + 1}: {error}", "build it for all steps of the run"
                )
            changed = {
                k
                for now, then in zip(self._other_options(), self._initial_options, strict=True)
                for k in now
                if now[k] != then.get(k)
            }
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
        shares = {rate / peak for rate, peak in rates if peak}
        least, most = min(shares, default=1.0), max(shares, default=1.0)
        if most - least > 1e-9 * max(1.0, abs(most)):
            self._refuse(
                f"has different shares of their rates for its groups: {sorted(shares)}",
                "give one function for all groups; their peaks may differ",
            )
        return most

    def _other_options(self) -> list[dict[str, object]]:
        return [{k: v for k, v in group.items() if k not in {"params", "lr"}} for group in self._groups]

    def _refuse(self, reason: str, hint: str) -> NoReturn:
        raise ConfigError(f"the scheduler {self._name} {reason}", where="schedule", hint=hint)
