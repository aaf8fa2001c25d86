"""The catalogue of switches and rules: ``rapidformer switches``, and pages of the manual that ``make docs`` writes.

It also has the compatibility of every pair of switches, with the rules that refuse a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, Environment
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.registry import DOCUMENTS, OWN, REGISTRY, Registry, in_words, sources_of
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import apply
from rapidformer_templates.planning.switch import ADD, TEMPLATES, Change, Request, Rule, Switch, spell
from rapidformer_templates.system.terminal import console

MARKS = ("<!-- made by make docs -->", "<!-- end of what is made -->")

MADE = "Written by `make docs` from the declarations in `src/rapidformer_templates/switches/`. Do not edit."

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
    if build_parser().parse_args(argv).markdown:
        print(markdown(REGISTRY, list(compatibility(REGISTRY))), end="")
    else:
        show(REGISTRY)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer switches``."""
    parser = CommandParser(
        prog="rapidformer switches", description="List the switches, their flags, and which of them go together."
    )
    parser.add_argument("--markdown", action="store_true", help="print the page docs/switches.md")
    return parser


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


def pages(registry: Registry, pairs: Pairs) -> Mapping[str, str]:
    """Return the text of each generated page by the name of its file in ``docs/``."""
    details = [
        "# Switches in detail",
        MADE,
        "The switches are in the [order of application](switches.md#catalogue-in-the-order-of-application).",
        *(_section(switch) for switch in registry.switches),
    ]
    rules = [
        "# Rules",
        MADE,
        "A run that breaks a rule is refused before a worker starts. The refusal shows the nearest commands that work. "
        "RF013 is only noted in the plan. `rapidformer explain CODE` shows what a rule refuses, why, an example, and "
        "what to do instead. The sources are explained [with the switches](switches.md#sources).",
        table(
            ("code", "rule", "why", "source"),
            [(rule.code, rule.title, rule.why, in_words(rule.source)) for rule in registry.all_rules],
        ),
    ]
    return {
        "switches.md": _switches_page(registry, pairs),
        "switch-details.md": "\n\n".join(details) + "\n",
        "rules.md": "\n\n".join(rules) + "\n",
    }


def markdown(registry: Registry, pairs: Pairs) -> str:
    """Return all generated pages as one text."""
    return "\n".join(pages(registry, pairs).values())


def _switches_page(registry: Registry, pairs: Pairs) -> str:
    catalogue = [
        (str(number), switch.name, switch.summary, _flags(switch)) for number, switch in enumerate(registry.switches, 1)
    ]
    optimizers = []
    for name, facts in OPTIMIZERS.items():
        needs = " and ".join(filter(None, (facts.needs_package, "a GPU" if facts.needs_cuda else "")))
        fallback = facts.fallback.path if facts.fallback else ""
        state, not_under = f"{facts.state_bytes:g}", ", ".join(sorted(facts.not_under))
        optimizers.append((f"`{name}`", facts.implementation.path, fallback, needs, state, not_under))
    numbers = [number for number, *_ in catalogue]
    matrix = [
        [f"{number} {switch.name}", *(pair.cell for pair in row), *[""] * (len(numbers) - len(row))]
        for number, switch, row in zip(numbers, registry.switches, pairs, strict=True)
    ]
    groups = refused_pairs(registry, pairs)
    count, all_pairs = sum(len(names) for _, names in groups), len(pairs) * (len(pairs) - 1) // 2
    refused = []
    for rules, names in groups:
        codes, reasons = " ".join(rule.code for rule in rules), ", ".join(dict.fromkeys(map(rule_origin, rules)))
        refused.append((codes, reasons, str(len(names)), ", ".join(names)))
    sources = [
        f"- **{document.name}**: " + (f"[{document.title}]({document.link})" if document.link else document.title)
        for document in DOCUMENTS.values()
    ]
    parts = [
        "# Switches",
        MADE,
        "This page lists every switch, and the switches that go together. [Details](switch-details.md) has the flags, "
        "requirements and receipts of each switch, and [rules](rules.md) has every combination that is refused.",
        "## Catalogue, in the order of application",
        table(("", "switch", "what it does", "flags"), catalogue),
        "## Optimizers",
        table(("", "class", "without apex or a GPU", "needs", "state, bytes per parameter", "not under"), optimizers),
        "## Compatibility",
        "Two switches at a time, on eight GPUs with every package: "
        "`T` Trainer, `P` Pretrainer, `F` Finetuner; `+` when what one of them requires is added; `–` never. "
        "Numbers refer to the catalogue. A switch under its own number is used alone, "
        f"and `optimizer` means `{spell(registry['optimizer'].on)}`.",
        table(["", *numbers], matrix),
        "## What is refused",
        f"{count} of {all_pairs} pairs, by the rules that refuse them. A reason is *documented* in one of the "
        "[sources](#sources), *of a package* that the product builds on, or our *own*.",
        table(("rules", "source of the reason", "pairs", "which"), refused),
        "## Sources",
        "\n".join([*sources, "- A name in lower case is the package with that name."]),
    ]
    return "\n\n".join(parts) + "\n"


def filled(page: str, registry: Registry, pairs: Pairs) -> str:
    """Return a page in which the current table of :func:`against_groups` is between the lines :data:`MARKS`."""
    header, *rows = against_groups(registry, pairs)
    before, rest = page.split(MARKS[0], 1)
    return before + f"{MARKS[0]}\n\n{table(header, rows)}\n\n" + MARKS[1] + rest.split(MARKS[1], 1)[1]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(*header), _row(*["---"] * len(header)), *(_row(*row) for row in rows)])


def _flags(switch: Switch) -> str:
    return " ".join(f"`{spelling(name)}`" for name in switch.fields) or "computed from the two batch sizes"


def _section(switch: Switch) -> str:
    """Return the section of one switch: each flag with its help, then the facts about the switch."""
    facts = [f"- `{spelling(f.name)}`: {f.metadata['help']}" for f in dataclasses.fields(switch.options)]
    facts = facts or ["- computed from `--micro-batch-size` and `--global-batch-size`"]
    facts += [
        f"- `--{alias}` is the same as `{spelling(f.name)}{f' {value}' if value else ''}`"
        for f in dataclasses.fields(switch.options)
        for alias, value in f.metadata["aliases"].items()
    ]
    facts.append(
        f"- precedence {switch.precedence.name}, templates {', '.join(switch.templates)}, "
        f"source {in_words(switch.source)}"
    )
    if switch.claims:
        facts.append(f"- takes over {', '.join(sorted(claim.value for claim in switch.claims))}")
    if switch.needs_package:
        facts.append(f"- needs `{switch.needs_package}`: {switch.install}")
    for label, value in (("engine", switch.engine), ("transform", switch.transform)):
        if value:
            facts.append(f"- {label} `{value}`")
    if switch.receipt:
        facts.append(f"- receipt in `summary.json`: {', '.join(f'`{name}`' for name in switch.receipt)}")
    if switch.rules:
        facts.append(f"- rules {', '.join(sorted(rule.code for rule in switch.rules))}")
    return f"## {switch.name}\n\n{switch.summary}\n\n" + "\n".join(facts)


def show(registry: Registry) -> None:
    """Print the catalogue and the matrix to a terminal."""
    from rich.table import Table

    catalogue = Table("", "switch", "flags", "what it does", "source", title="Switches, in order of application")
    for number, switch in enumerate(registry.switches, 1):
        flags = _flags(switch).replace("`", "")
        catalogue.add_row(str(number), switch.name, flags, switch.summary, in_words(switch.source))
    console(piped_width=140).print(catalogue)
    rows = [[pair.cell for pair in row] for row in compatibility(registry)]
    print("\nTwo at a time: T Trainer, P Pretrainer, F Finetuner, + if what one of them requires is added, – never")
    print(" " * 26 + "".join(f"{number:<4}" for number in range(1, len(rows) + 1)))
    for number, (switch, cells) in enumerate(zip(registry.switches, rows, strict=True), 1):
        print(f"{number:>2} {switch.name:<23}" + "".join(f"{cell:<4}" for cell in cells))


if __name__ == "__main__":
    folder, pairs = Path(sys.argv[1]), list(compatibility(REGISTRY))
    parallelism = (folder / "parallelism.md").read_text(encoding="utf-8")
    for name, text in (*pages(REGISTRY, pairs).items(), ("parallelism.md", filled(parallelism, REGISTRY, pairs))):
        (folder / name).write_text(text, encoding="utf-8")
