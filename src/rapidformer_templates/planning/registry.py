"""The registry of all switches and rules, and the documents that they come from. Does not import torch.

A switch is found if it is in the folder of switches, or if an installed package declares it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.data_rules import DATA_RULES
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.rules import RULES
from rapidformer_templates.planning.switch import Finding, Request, Rule, Switch

SWITCHES = "rapidformer_templates.switches"
"""The package in which switches are found, and the group of entry points for switches of other packages.

It is a name and not an import, because planning is a lower layer than the switches.
"""


OWN = "rapidformer_templates"
"""Source of a rule that is neither documented nor due to another package."""


@dataclass(frozen=True)
class Document:
    """A document that declarations name by a letter.

    Attributes:
        name: what messages and pages call it.
        title: its title.
        link: its address, if there is one.
    """

    name: str
    title: str
    link: str = ""


_DOCUMENTS = tomllib.loads(Path(__file__).with_name("documents.toml").read_text("utf-8"))
DOCUMENTS: Mapping[str, Document] = {letter: Document(**facts) for letter, facts in _DOCUMENTS.items()}
"""Documents by their letter. All other sources are names of packages, papers, or this library."""


def sources_of(source: str) -> Sequence[str]:
    """Return the parts of a source: ``[R, torch]`` is ``R`` and ``torch``."""
    return source.strip("[]").split(", ")


def in_words(source: str) -> str:
    """Return a source as a reader sees it: ``[R, torch]`` is ``Rapidformer parameter reference, torch``."""
    words = {letter: document.name for letter, document in DOCUMENTS.items()}
    words |= dict.fromkeys((OWN, "environment"), "this library")
    return ", ".join(words.get(part, part) for part in sources_of(source))


@dataclass(frozen=True)
class Registry:
    """Switches in the order in which they are applied, and the rules that belong to none of them."""

    switches: tuple[Switch, ...]
    rules: tuple[Rule, ...]

    def __getitem__(self, name: str) -> Switch:
        """Return the switch with this name.

        Raises:
            KeyError: there is no such switch.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, Switch]:
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """Every rule once, sorted by code."""
        return _by_code([*self.rules, *(rule for switch in self.switches for rule in switch.rules)])

    def consulted(self, request: Request) -> tuple[Rule, ...]:
        """Return the general rules and those of the active switches, sorted by code."""
        return _by_code([*self.rules, *(rule for switch in request.active.values() for rule in switch.rules)])

    def refusals(self, request: Request) -> list[tuple[Rule, Finding]]:
        """Return every rule that refuses the request, with the finding."""
        return [(rule, finding) for rule in self.consulted(request) if rule.refuses for finding in rule.check(request)]

    def options(self) -> dict[str, type]:
        """Return the options dataclass of each switch, by its name: the ``switch_options`` of ``config.parse``."""
        return {switch.name: switch.options for switch in self.switches}

    def complete(self, config: RunConfig) -> RunConfig:
        """Return the configuration with default options for each switch that it does not contain."""
        missing = {name: options() for name, options in self.options().items() if name not in config.switches}
        return dataclasses.replace(config, switches={**config.switches, **missing}) if missing else config

    def merge_files(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the values of the switches' own files. Flags keep their values.

        Raises:
            ConfigError: a file cannot be used.
        """
        for switch in self.switches:
            config = switch.adopt(config) if switch.adopt else config
        return config


def _by_code(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rule for _, rule in sorted({rule.code: rule for rule in rules}.items()))


def _discover() -> tuple[Switch, ...]:
    """Return the switches of all files and folders in the package of switches, and those of other packages.

    Raises:
        ConfigError: another package cannot be imported, or does not declare a tuple of switches.
    """
    switches: list[Switch] = []
    folder = importlib.import_module(SWITCHES)
    for module in pkgutil.iter_modules(folder.__path__, f"{SWITCHES}."):
        switches += importlib.import_module(f"{module.name}.declaration" if module.ispkg else module.name).SWITCHES
    for point in entry_points(group=SWITCHES):
        package = point.dist.name if point.dist else point.module
        try:
            loaded = point.load()
        except Exception as error:  # another package's module may raise anything
            message = f"the switches of the package {package} cannot be loaded: {type(error).__name__}: {error}"
            raise ConfigError(message, hint=_WITHOUT) from error
        declared = getattr(loaded, "SWITCHES", loaded)
        if not isinstance(declared, tuple) or not all(isinstance(switch, Switch) for switch in declared):
            message = f"{point.value} of the package {package} has no tuple SWITCHES of switches"
            raise ConfigError(message, hint=_WITHOUT)
        switches += declared
    _check_names(switches)
    # A rule that concerns another switch moves to that one, if it exists.
    moved = [rule for switch in switches for rule in switch.rules if rule.concerns]
    in_order = []
    for switch in sorted(switches, key=lambda switch: (switch.precedence, switch.name)):
        own = tuple(rule for rule in switch.rules if not rule.concerns)
        others = tuple(rule for rule in moved if rule.concerns == switch.name)
        in_order.append(dataclasses.replace(switch, rules=own + others))
    return tuple(in_order)


_WITHOUT = "fix the package, or uninstall it"


def _check_names(switches: Sequence[Switch]) -> None:
    """Check the names that switches of other packages declare and use.

    Raises:
        ConfigError: a switch, flag or rule code exists already, or a flag needs one that does not exist.
    """
    names: dict[str, object] = {}
    codes: dict[str, object] = {rule.code: rule for rule in GENERAL}
    sections = [(field.name, section) for section in SECTIONS.values() for field in dataclasses.fields(section)]
    flags: dict[str, object] = {spelling(name): section for name, section in sections}

    for switch in switches:
        claims: list[tuple[dict[str, object], str, str, object]] = [(names, "the switch", switch.name, switch.options)]
        claims += [(flags, "the flag", spelling(field), switch.options) for field in switch.fields]
        claims += [(codes, "the rule", rule.code, rule) for rule in switch.rules]
        for owners, what, name, owner in claims:
            if owners.setdefault(name, owner) is not owner:
                raise ConfigError(f"{what} {name} is declared twice", where=switch.options.__module__, hint=_WITHOUT)
    for switch in switches:
        for declared in dataclasses.fields(switch.options):
            other, _ = declared.metadata.get("only_with") or (None, None)
            if other and spelling(other) not in flags:
                message = f"the flag {spelling(declared.name)} needs {spelling(other)}, which does not exist"
                raise ConfigError(message, where=switch.options.__module__, hint=_WITHOUT)


GENERAL = (*RULES, *DATA_RULES)
"""Rules that belong to no switch."""

REGISTRY = Registry(_discover(), GENERAL)


def switch_options() -> dict[str, type]:
    """Return the options dataclass of each switch of this version, by the switch's name."""
    return REGISTRY.options()


def load_object(path: str) -> Any:
    """Import the object that ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
