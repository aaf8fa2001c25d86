"""Requests and machines that the tests of switches share."""

import dataclasses
import shlex
from collections.abc import Iterable
from textwrap import dedent
from typing import Any

import pytest

from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, Environment
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY, Registry, switch_options
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import Rule

CPU = Environment(world_size=2, local_world_size=2)
GPUS = Environment(
    world_size=8,
    local_world_size=8,
    device="cuda",
    compute_capability=(9, 0),
    packages=dict.fromkeys(OPTIONAL_PACKAGES, "any"),
)


def config_of(flags: str) -> RunConfig:
    return parse(shlex.split(flags), switch_options())


def on(place: Environment, **facts: Any) -> Environment:
    """Return the machine with some facts replaced."""
    return dataclasses.replace(place, **facts)


def codes(
    flags: str | RunConfig, place: Environment = CPU, registry: Registry = REGISTRY, *, training: bool = False
) -> list[str]:
    """Return the codes of the rules that refuse a request, or an empty list if it is accepted."""
    config = config_of(flags) if isinstance(flags, str) else flags
    try:
        resolve(config, place, registry, training=training)
    except Refused as refused:
        return [found.rule for found in refused.diagnostics]
    return []


def without_rule(code: str) -> Registry:
    """Return the registry without one rule."""

    def others(rules: Iterable[Rule]) -> tuple[Rule, ...]:
        return tuple(rule for rule in rules if rule.code != code)

    switches = (dataclasses.replace(switch, rules=others(switch.rules)) for switch in REGISTRY.switches)
    return Registry(tuple(switches), others(REGISTRY.rules))


def with_switches(names: Iterable[str]) -> RunConfig:
    """Return a request for the named switches and nothing else."""
    values = {field: value for name in names for field, value in REGISTRY[name].on.items()}
    return REGISTRY.complete(RunConfig()).replace("test", **values)


def refusal(flags: str, place: Environment, registry: Registry = REGISTRY, *, training: bool = False) -> str:
    with pytest.raises(Refused) as refused:
        resolve(config_of(flags), place, registry, training=training)
    return refused.value.render()


def exactly(text: str) -> str:
    return dedent(text).strip("\n")
