"""``rapidformer switches``: the catalogue of the switches, and which of them go together."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, Environment
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.planning.registry import REGISTRY, Registry, in_words
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import apply
from rapidformer_templates.planning.switch import ADD, TEMPLATES, Change, Request, Rule, Switch
from rapidformer_templates.system.terminal import console

# The matrix shows which switches work together, not what this machine has. So it assumes eight GPUs and all packages.
MATRIX_MACHINE = Environment(
    world_size=8,
    local_world_size=8,
    device="cuda",
    compute_capability=(8, 0),
    packages=dict.fromkeys(OPTIONAL_PACKAGES, "any"),
)


def main(argv: Sequence[str]) -> int:
    """Print the catalogue.

    Args:
        argv: words after ``rapidformer switches``.
    """
    build_parser().parse_args(argv)
    show(REGISTRY)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer switches``."""
    about = "List the switches, their flags, and which of them go together."
    return CommandParser(prog="rapidformer switches", description=about)


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
        possible = (change for _, finding in refusals for change in finding.changes)
        change = next((one for one in possible if one.cost == ADD and one not in changes), None)
        if change is None:
            return changes, tuple({rule.code: rule for rule, _ in refusals}.values())
        changes.append(change)
    return changes, ()


def compatibility(registry: Registry) -> Iterator[list[CompatibilityTable]]:
    """Yield, for each switch, its compatibility with each switch up to itself."""
    for i, switch in enumerate(registry.switches):
        yield [compatibility_of(registry, switch, other) for other in registry.switches[: i + 1]]


def flags_of(switch: Switch) -> str:
    return " ".join(f"`{spelling(name)}`" for name in switch.fields) or "computed from the two batch sizes"


def show(registry: Registry) -> None:
    """Print the catalogue and the matrix to a terminal."""
    from rich.table import Table

    catalogue = Table("", "switch", "flags", "what it does", "source", title="Switches, in order of application")
    for number, switch in enumerate(registry.switches, 1):
        flags = flags_of(switch).replace("`", "")
        catalogue.add_row(str(number), switch.name, flags, switch.summary, in_words(switch.source))
    console(piped_width=140).print(catalogue)
    rows = [[pair.cell for pair in row] for row in compatibility(registry)]
    print("\nTwo at a time: T Trainer, P Pretrainer, F Finetuner, + if what one of them requires is added, – never")
    print(" " * 26 + "".join(f"{number:<4}" for number in range(1, len(rows) + 1)))
    for number, (switch, cells) in enumerate(zip(registry.switches, rows, strict=True), 1):
        print(f"{number:>2} {switch.name:<23}" + "".join(f"{cell:<4}" for cell in cells))
