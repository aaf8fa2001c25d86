"""The registry: every switch and every rule.

A switch is found because it lies in the folder of switches, or because an installed package names it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.data_rules import DATA_RULES
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.general_rules import RULES
from rapidformer_templates.planning.preference_rules import PREFERENCE_RULES
from rapidformer_templates.planning.switch import Finding, Request, Rule, Switch
from rapidformer_templates.planning.training_rules import TRAINING_RULES

SWITCHES = "rapidformer_templates.switches"
"""The folder in which switches are found, and the group of entry points by which those of other packages are.

Its name stands for it: what is planned lies below what acts.
"""


@dataclass(frozen=True)
class Registry:
    """Switches in the order in which they are applied, and the rules that belong to none of them."""

    switches: tuple[Switch, ...]
    rules: tuple[Rule, ...]

    def __getitem__(self, name: str) -> Switch:
        """The switch of this name.

        Raises:
            KeyError: there is none.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, Switch]:
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """Every rule once, by code."""
        return _by_code([*self.rules, *(rule for switch in self.switches for rule in switch.rules)])

    def consulted(self, request: Request) -> tuple[Rule, ...]:
        """The general rules and those of the active switches, by code."""
        return _by_code([*self.rules, *(rule for switch in request.active.values() for rule in switch.rules)])

    def refusals(self, request: Request) -> list[tuple[Rule, Finding]]:
        """Return every rule that refuses the request, with the finding."""
        return [(rule, finding) for rule in self.consulted(request) if rule.refuses for finding in rule.check(request)]

    def noted(self, request: Request) -> list[Finding]:
        """Return the findings of the rules that only add a note."""
        return [finding for rule in self.consulted(request) if not rule.refuses for finding in rule.check(request)]

    def options(self) -> dict[str, type]:
        """The options dataclass of each switch, by its name: the ``switch_options`` of ``config.parse``."""
        return {switch.name: switch.options for switch in self.switches}

    def complete(self, config: RunConfig) -> RunConfig:
        """The configuration with default options for each switch that it does not mention."""
        missing = {name: options() for name, options in self.options().items() if name not in config.switches}
        return dataclasses.replace(config, switches={**config.switches, **missing}) if missing else config

    def adopt(self, config: RunConfig) -> RunConfig:
        """The configuration with what files of the switches' own say; where no flag says it, the file is its origin.

        Raises:
            ConfigError: a file cannot be used.
        """
        return reduce(lambda adopted, switch: switch.adopt(adopted) if switch.adopt else adopted, self.switches, config)

    def without(self, code: str) -> Registry:
        """This registry without the rule of that code: what the test of a rule compares with."""

        def others(rules: Iterable[Rule]) -> tuple[Rule, ...]:
            return tuple(rule for rule in rules if rule.code != code)

        switches = (dataclasses.replace(switch, rules=others(switch.rules)) for switch in self.switches)
        return Registry(tuple(switches), others(self.rules))


def _by_code(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rule for _, rule in sorted({rule.code: rule for rule in rules}.items()))


def _discover() -> tuple[Switch, ...]:
    """The switches of every file in the folder of switches, of the ``declaration`` of every folder, and of others."""
    switches: list[Switch] = []
    folder = importlib.import_module(SWITCHES)
    for module in pkgutil.iter_modules(folder.__path__, f"{SWITCHES}."):
        switches += importlib.import_module(f"{module.name}.declaration" if module.ispkg else module.name).SWITCHES
    for point in entry_points(group=SWITCHES):
        switches += _declared_by(point)
    _check_unique(switches)
    return tuple(sorted(switches, key=lambda switch: (switch.precedence, switch.name)))


def _declared_by(point: EntryPoint) -> tuple[Switch, ...]:
    """The switches of another package.

    Raises:
        ConfigError: it cannot be imported, or declares something else.
    """
    package = point.dist.name if point.dist else point.module
    try:
        loaded = point.load()
    except Exception as error:  # whatever somebody else's module raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the switches of the package {package} cannot be loaded: {reason}", hint=_WITHOUT) from error
    declared = getattr(loaded, "SWITCHES", loaded)
    if not isinstance(declared, tuple) or not all(isinstance(switch, Switch) for switch in declared):
        raise ConfigError(f"{point.value} of the package {package} has no tuple SWITCHES of switches", hint=_WITHOUT)
    return declared


_WITHOUT = "mend the package, or uninstall it"


def _check_unique(switches: Sequence[Switch]) -> None:
    """Raise a :class:`ConfigError` when a switch of another package has a name, a flag or a code that there is."""
    names: dict[str, Any] = {}
    codes: dict[str, Any] = {rule.code: rule for rule in GENERAL}
    sections = [(field.name, section) for section in SECTIONS.values() for field in dataclasses.fields(section)]
    flags: dict[str, Any] = {spelling(name): section for name, section in sections}

    for switch in switches:
        claims: list[tuple[dict[str, Any], str, str, Any]] = [(names, "the switch", switch.name, switch.options)]
        claims += [(flags, "the flag", spelling(field), switch.options) for field in switch.fields]
        claims += [(codes, "the rule", rule.code, rule) for rule in switch.rules]
        for owners, what, name, owner in claims:
            if owners.setdefault(name, owner) is not owner:
                raise ConfigError(f"{what} {name} is declared twice", where=switch.options.__module__, hint=_WITHOUT)


GENERAL = (*RULES, *TRAINING_RULES, *PREFERENCE_RULES, *DATA_RULES)
"""Rules that belong to no switch."""

REGISTRY = Registry(_discover(), GENERAL)


def switch_options() -> dict[str, type]:
    """The options dataclass of each switch of this version, by the switch's name."""
    return REGISTRY.options()


def load_object(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
