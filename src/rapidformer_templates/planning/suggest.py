"""Finds the nearest combinations that work, with a uniform-cost search over changes to the request."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

from rapidformer_templates.errors import Suggestion
from rapidformer_templates.planning.changes import REPLACE, WITHOUT, drop, spell
from rapidformer_templates.planning.checks import PARTITIONING
from rapidformer_templates.planning.registry import Registry
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.switch import Change, Request, Resource, Switch

Path = tuple[Change, ...]

# Maximum number of combinations to try before the search removes everything that clashes. A typical search tries fewer
# than thirty, at about 0.1 ms each.
MAX_LOOKS = 120

STATES = {
    Resource.OPTIMIZER_STATE: "optimizer state",
    Resource.GRADIENTS: "gradients",
    Resource.PARAMETERS: "parameters",
}
SAME = {1: "state", 2: "two states", 3: "three states"}


def nearest(request: Request, registry: Registry, limit: int = 3) -> list[Path]:
    """Return up to ``limit`` sets of changes after which no rule refuses the request, nearest first.

    Every solution must fix all findings. So the search branches on only one finding of a state: the one with the fewest
    possible changes. Each returned set has been checked against all rules.
    """
    frontier: list[tuple[float, int, Path]] = [(0.0, 0, ())]
    tie_breaker = itertools.count(1)
    visited: set[frozenset[tuple[str, object]]] = set()
    paths: list[Path] = []
    nearest_cost = 0.0
    for _ in range(MAX_LOOKS):
        if not frontier or len(paths) == limit:
            break
        cost, _, path = heapq.heappop(frontier)
        if paths and cost >= nearest_cost + REPLACE:
            break  # too far away to be helpful
        choices = _ways_out(apply(request, path, registry), registry)
        if choices is None:
            if not any(_is_nearer(other, path) for other in paths):
                nearest_cost = nearest_cost if paths else cost
                paths.append(path)
            continue
        for change in choices:
            longer = (*path, change)
            state = frozenset(_values(longer).items())
            if not _overlap(path, change) and state not in visited:
                visited.add(state)
                heapq.heappush(frontier, (cost + change.cost, next(tie_breaker), longer))
    return paths or [_take_out(request, registry)]


def apply(request: Request, changes: Iterable[Change], registry: Registry) -> Request:
    """Return the request after the changes."""
    values: dict[str, object] = {}
    environment = request.environment
    for change in changes:
        values.update(change.values)
        if change.template:
            environment = dataclasses.replace(environment, template=change.template)
        if change.values.get("device") == "cpu":
            environment = dataclasses.replace(environment, device="cpu", compute_capability=None)
    config = request.config.replace("suggestion", **values)
    return build_request(config, environment, registry.switches, training=request.training, model=request.model)


def to_suggestion(path: Sequence[Change]) -> Suggestion:
    """Format the changes as text. Removed flags come last."""
    words = [change.describe for change in path]
    removals = " ".join(word.removeprefix(WITHOUT) for word in words if word.startswith(WITHOUT))
    additions = [word for word in words if not word.startswith(WITHOUT)]
    notes = dict.fromkeys(change.note for change in path if change.note)
    return Suggestion(" ".join([*additions, WITHOUT + removals] if removals else additions), "; ".join(notes))


def _ways_out(request: Request, registry: Registry) -> list[Change] | None:
    """Return the changes that may fix one finding of the request, or None if there is no finding."""
    options = []
    for _, finding in registry.refusals(request):
        changes = list(finding.changes)
        for name in finding.switches:
            switch = request.active[name]
            # Another one of its family can replace it, unless two of them are active already.
            if switch.family and len(request.of_family(switch.family)) == 1:
                family = [other for other in registry.switches if other.family == switch.family]
                changes += [_exchange(switch, other) for other in family if other != switch]
            changes.append(drop({name: off for name, off in switch.off.items() if request.config.get(name) != off}))
        options.append(sorted(changes, key=lambda change: change.cost))
    return min(options, key=len) if options else None


def _exchange(switch: Switch, other: Switch) -> Change:
    difference = len(switch.claims ^ other.claims)
    note = f"in place of {switch.name}"
    if switch.family == PARTITIONING:
        states = [word for resource, word in STATES.items() if resource in other.claims]
        note = f"shards {', '.join(states)}" if difference else f"shards the same {SAME[len(states)]}"
    return Change(spell(other.on), REPLACE + difference / 10, {**switch.off, **other.on}, note=note)


def _values(path: Sequence[Change]) -> dict[str, object]:
    """Return the fields that the changes set, including the template."""
    values: dict[str, object] = {}
    for change in path:
        values.update(change.values)
        if change.template:
            values["template"] = change.template
    return values


def _is_nearer(changes: Sequence[Change], path: Sequence[Change]) -> bool:
    """Return whether ``path``, which costs at least as much, only extends ``changes`` or removes the same switches."""
    new_values, path_values = _values(changes), _values(path)
    given_up, its_given_up = (
        {name for name, value in values.items() if not value} for values in (new_values, path_values)
    )
    return new_values.items() <= path_values.items() or bool(given_up and given_up == its_given_up)


def _overlap(path: Sequence[Change], change: Change) -> bool:
    """Return whether the change touches a field that the path has already changed. Undoing it would lead to cycles."""
    return not _values(path).keys().isdisjoint(_values((change,)))


def _take_out(request: Request, registry: Registry) -> Path:
    """Fix each finding with its most expensive change, which removes something. This is the last resort."""
    path: Path = ()
    while choices := _ways_out(apply(request, path, registry), registry):
        fresh = [change for change in choices if not _overlap(path, change)]
        path = (*path, (fresh or choices)[-1])
    return path
