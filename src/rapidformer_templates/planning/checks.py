"""Checks that several rules share, and a note that several switches share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from rapidformer_templates.planning.changes import move
from rapidformer_templates.planning.switch import TEMPLATES, Finding, Request, Resource, Switch

PARTITIONING = "partitioning"  # the family of switches that divide the model's states over the workers


def needs_template(*names: str) -> Callable[[Request], list[Finding]]:
    """Build a check that refuses each named switch outside of its ``templates``."""

    def one(request: Request, switch: Switch) -> Finding:
        several = f"one of the templates {', '.join(TEMPLATES)}"
        needed = several if len(switch.templates) > 1 else f"the {switch.templates[0]} template"
        return Finding(
            f"{switch.name} needs {needed}",
            (*request.asked_for(switch.name), request.asked_template()),
            switches=(switch.name,),
            changes=tuple(move(request, template) for template in switch.templates),
        )

    def check(request: Request) -> list[Finding]:
        active = (request.active[name] for name in names if name in request.active)
        return [one(request, switch) for switch in active if request.environment.template not in switch.templates]

    return check


Side = str | Resource | Callable[[Switch], bool] | tuple[Any, ...] | Mapping[str, str]
"""One side of an exclusion: the name of a switch or family, a claimed resource, a predicate, or a tuple of sides.

A mapping of names adds to each the reason why the other side excludes it.
"""


TOGETHER, TOGETHER_REVERSED = "{0} does not work together with {1}", "{1} does not work together with {0}"


def excludes(one: Side, other: Side, message: str = TOGETHER) -> Callable[[Request], list[Finding]]:
    """Build a check that refuses any active switch of one side with any of the other.

    The message has a place for each.
    """

    def check(request: Request) -> list[Finding]:
        return [
            Finding(message.format(a, b) + why, request.asked_for(a, b), switches=(a, b))
            for a, _ in _of_side(request, one)
            for b, why in _of_side(request, other)
        ]

    return check


def _of_side(request: Request, side: Side) -> list[tuple[str, str]]:
    """Return the names of the active switches of a side, each with the words that explain why."""
    if isinstance(side, str):
        return [(name, "") for name, switch in request.active.items() if side in (name, switch.family)]
    if isinstance(side, Resource):
        return [(name, "") for name, switch in request.active.items() if side in switch.claims]
    if isinstance(side, Mapping):
        return [(name, f", which {why}") for name, why in side.items() if name in request.active]
    if callable(side):
        return [(name, "") for name, switch in request.active.items() if side(switch)]
    return [finding for part in side for finding in _of_side(request, part)]


def idle_without_copies(note: str) -> Callable[[Request], tuple[str, ...]]:
    """Build the note of a switch that has nothing to do if no other worker has the same parameters."""
    return lambda request: (note,) if request.sizes.copies == 1 else ()


def one_claim(*resources: Resource) -> Callable[[Request], list[Finding]]:
    """Build a check that refuses two active switches that claim one of these resources."""

    def check(request: Request) -> list[Finding]:
        claiming = [switch for switch in request.active.values() if not switch.claims.isdisjoint(resources)]
        findings = []
        for a, b in itertools.combinations(claiming, 2):
            shared = [resource.value for resource in resources if resource in a.claims & b.claims]
            if shared:
                message = f"{a.name} and {b.name} both take over {shared[0]}"
                findings.append(Finding(message, request.asked_for(a.name, b.name), switches=(a.name, b.name)))
        return findings

    return check
