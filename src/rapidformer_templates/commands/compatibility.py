"""Compatibility of the switches: every pair of them, and the rules that refuse a pair."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, Environment
from rapidformer_templates.planning.registry import DOCUMENTS, OWN, REGISTRY, Registry, sources_of
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import apply
from rapidformer_templates.planning.switch import ADD, TEMPLATES, Change, Request, Rule, Switch

# The matrix shows which switches work together, not what this machine has. So it assumes eight GPUs and all packages.
MATRIX_MACHINE = Environment(
    world_size=8,
    local_world_size=8,
    device="cuda",
    compute_capability=(8, 0),
    packages=dict.fromkeys(OPTIONAL_PACKAGES, "any"),
)


@dataclass(frozen=True)
class CompatibilityTable:
    """The compatibility of a set of switches.

    Attributes:
        templates: first letters of the templates that accept the switches.
        needs_additions: whether a switch requires something that is added.
        refusals: broken rules of the template with the fewest of them. Empty if a template accepts the switches.
    """

    templates: str
    needs_additions: bool
    refusals: tuple[Rule, ...]

    @property
    def cell(self) -> str:
        return (self.templates + "+" * self.needs_additions) or "–"


def compatibility_of(registry: Registry, *switches: Switch) -> CompatibilityTable:
    """Check a run with these switches against the rules, in every template."""
    values = {name: value for switch in switches for name, value in switch.on.items()}
    config = registry.complete(RunConfig()).replace("matrix", **values)
    letters, needs_additions, refusals = "", False, []
    for template in TEMPLATES:
        environment = dataclasses.replace(MATRIX_MACHINE, template=template)
        additions, rules = with_additions(build_request(config, environment, registry.switches), registry)
        if rules:
            refusals.append(rules)
        else:
            letters += template[0]
            needs_additions |= bool(additions)
    return CompatibilityTable(letters, needs_additions, () if letters else min(refusals, key=len))


def with_additions(request: Request, registry: Registry) -> tuple[list[Change], tuple[Rule, ...]]:
    """Return the changes that the request needs to be accepted, and the rules that it breaks even with them."""
    changes: list[Change] = []
    while refusals := registry.refusals(apply(request, changes, registry)):
        change = next(
            (c for _, finding in refusals for c in finding.changes if c.cost == ADD and c not in changes), None
        )
        if change is None:
            return changes, tuple({rule.code: rule for rule, _ in refusals}.values())
        changes.append(change)
    return changes, ()


Pairs = Sequence[Sequence[CompatibilityTable]]
"""For each switch of a registry, its compatibility with each switch up to itself."""


def compatibility(registry: Registry) -> Iterator[list[CompatibilityTable]]:
    """Yield, for each switch, its compatibility with each switch up to itself."""
    for i, switch in enumerate(registry.switches):
        yield [compatibility_of(registry, switch, other) for other in registry.switches[: i + 1]]


def rule_origin(rule: Rule) -> str:
    """Return the origin of a rule: the documents, a package that the library uses, or the library itself."""
    sources = sources_of(rule.source)
    if any(source in DOCUMENTS for source in sources):
        return "documented"
    return "own" if sources == [OWN] else "of a package"


def refused_pairs(registry: Registry, pairs: Pairs) -> list[tuple[tuple[Rule, ...], list[str]]]:
    """Return the pairs that no template accepts, grouped by the rules that refuse them, largest group first."""
    rules: dict[tuple[str, ...], tuple[Rule, ...]] = {}
    pairs_by_rules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (i, row), switch in zip(enumerate(pairs), registry.switches, strict=True):
        for other, pair in zip(registry.switches[:i], row, strict=False):
            if pair.refusals:
                codes = tuple(rule.code for rule in pair.refusals)
                rules[codes] = pair.refusals
                pairs_by_rules[codes].append(f"{other.name} × {switch.name}")
    order = sorted(pairs_by_rules, key=lambda codes: (-len(pairs_by_rules[codes]), codes))
    return [(rules[codes], pairs_by_rules[codes]) for codes in order]


def against_groups(registry: Registry, pairs: Pairs) -> list[list[str]]:
    """Return a table of each switch against the switches that divide the workers into groups.

    These switches divide a model, samples or sequences over separate groups of workers. A cell is "yes", or the codes
    of the rules that refuse the pair.
    """
    dividing = [
        (i, switch)
        for i, switch in enumerate(registry.switches)
        if switch.sizes or switch.dimensions is not Switch.dimensions
    ]
    table = [["", *(switch.name for _, switch in dividing)]]
    for i, switch in enumerate(registry.switches):
        cells = [pairs[max(i, j)][min(i, j)] for j, _ in dividing]
        codes = [" ".join(rule.code for rule in pair.refusals) for pair in cells]
        names = ["" if i == j else code or "yes" for (j, _), code in zip(dividing, codes, strict=True)]
        table.append([switch.name, *names])
    return table


def accepted(registry: Registry, size: int) -> tuple[int, int]:
    """Return (number accepted, number of all) combinations of ``size`` switches."""
    verdicts = [
        bool(compatibility_of(registry, *some).templates) for some in itertools.combinations(registry.switches, size)
    ]
    return sum(verdicts), len(verdicts)


if __name__ == "__main__":
    for count in (2, 3):
        some, of_all = accepted(REGISTRY, count)
        print(f"{some:,} of {of_all:,} combinations of {count} switches are accepted")
