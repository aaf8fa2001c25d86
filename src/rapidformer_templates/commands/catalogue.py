"""The catalogue of switches and rules: ``rapidformer switches``, and pages of the manual that ``make docs`` writes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rapidformer_templates.commands.compatibility import (
    Pairs,
    against_groups,
    compatibility,
    refused_pairs,
    rule_origin,
)
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.registry import DOCUMENTS, REGISTRY, Registry, in_words
from rapidformer_templates.planning.switch import Switch, spell
from rapidformer_templates.system.terminal import console

MARKS = ("<!-- made by make docs -->", "<!-- end of what is made -->")


MADE = "Written by `make docs` from the declarations in `src/rapidformer_templates/switches/`. Do not edit."


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
        facts.append(f"- rules {', '.join(rule.code for rule in switch.rules)}")
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
