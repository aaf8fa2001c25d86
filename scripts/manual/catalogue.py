"""The pages about switches and rules that ``make docs`` writes: ``python -m scripts.manual.catalogue docs``."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rapidformer_templates.commands.catalogue import CompatibilityTable, compatibility, flags_of
from rapidformer_templates.planning.changes import spell
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.registry import DOCUMENTS, OWN, REGISTRY, in_words, sources_of
from rapidformer_templates.planning.switch import TEMPLATES, Rule, Switch

MARKS = ("<!-- made by make docs -->", "<!-- end of what is made -->")

MADE = "Written by `make docs` from the declarations in `src/rapidformer_templates/switches/`. Do not edit."

Pairs = Sequence[Sequence[CompatibilityTable]]
"""For each switch, its compatibility with each switch up to itself."""


def rule_origin(rule: Rule) -> str:
    """Return the origin of a rule: the documents, a package that the library uses, or the library itself."""
    sources = sources_of(rule.source)
    if any(source in DOCUMENTS for source in sources):
        return "documented"
    return "own" if sources == [OWN] else "of a package"


def refused_pairs(pairs: Pairs) -> list[tuple[tuple[Rule, ...], list[str]]]:
    """Return the pairs that no template accepts, grouped by the rules that refuse them, largest group first."""
    rules: dict[tuple[str, ...], tuple[Rule, ...]] = {}
    pairs_by_rules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (i, row), switch in zip(enumerate(pairs), REGISTRY.switches, strict=True):
        for other, pair in zip(REGISTRY.switches[:i], row, strict=False):
            if pair.refusals:
                codes = tuple(rule.code for rule in pair.refusals)
                rules[codes] = pair.refusals
                pairs_by_rules[codes].append(f"{other.name} × {switch.name}")
    order = sorted(pairs_by_rules, key=lambda codes: (-len(pairs_by_rules[codes]), codes))
    return [(rules[codes], pairs_by_rules[codes]) for codes in order]


def against_groups(pairs: Pairs) -> list[list[str]]:
    """Return a table of each switch against the switches that divide the workers into groups.

    These switches divide a model, samples or sequences over separate groups of workers. A cell is "yes", or the codes
    of the rules that refuse the pair.
    """
    dividing = [
        (i, switch)
        for i, switch in enumerate(REGISTRY.switches)
        if switch.sizes or switch.dimensions is not Switch.dimensions
    ]
    table = [["", *(switch.name for _, switch in dividing)]]
    for i, switch in enumerate(REGISTRY.switches):
        cells = [pairs[max(i, j)][min(i, j)] for j, _ in dividing]
        codes = [" ".join(rule.code for rule in pair.refusals) for pair in cells]
        names = ["" if i == j else code or "yes" for (j, _), code in zip(dividing, codes, strict=True)]
        table.append([switch.name, *names])
    return table


def pages(pairs: Pairs) -> Mapping[str, str]:
    """Return the text of each generated page by the name of its file in ``docs/``."""
    details = [
        "# Switches in detail",
        MADE,
        "The flags, packages, receipts and rules of each switch of the [catalogue](switches.md). Receipts are in "
        "`summary.json`. `rapidformer explain RF006` explains a rule.",
        *(_section(switch) for switch in REGISTRY.switches),
    ]
    rules = [
        "# Rules",
        MADE,
        "A run that breaks a rule is refused before a worker starts. The refusal shows the nearest commands that work. "
        "RF013 is only noted in the plan. `rapidformer explain CODE` shows a rule, the reason for it, an example, and "
        "what to do instead. The sources are explained [with the switches](switches.md#sources).",
        table(
            ("code", "rule", "why", "source"),
            [(rule.code, rule.title, rule.why, in_words(rule.source)) for rule in REGISTRY.all_rules],
        ),
    ]
    return {
        "switches.md": _switches_page(pairs),
        "switch-details.md": "\n\n".join(details) + "\n",
        "rules.md": "\n\n".join(rules) + "\n",
    }


def _switches_page(pairs: Pairs) -> str:
    catalogue = [
        (str(number), switch.name, switch.summary, flags_of(switch))
        for number, switch in enumerate(REGISTRY.switches, 1)
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
        for number, switch, row in zip(numbers, REGISTRY.switches, pairs, strict=True)
    ]
    groups = refused_pairs(pairs)
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
        f"and `optimizer` means `{spell(REGISTRY['optimizer'].on)}`.",
        table(["", *numbers], matrix),
        "## Refused pairs",
        f"{count} of {all_pairs} pairs, by the rules that refuse them. A reason is *documented* in one of the "
        "[sources](#sources), *of a package* that the product builds on, or our *own*.",
        table(("rules", "source of the reason", "pairs", "which"), refused),
        "## Sources",
        "\n".join([*sources, "- A name in lower case is the package with that name."]),
    ]
    return "\n\n".join(parts) + "\n"


def filled(page: str, pairs: Pairs) -> str:
    """Return a page in which the current table of :func:`against_groups` is between the lines :data:`MARKS`."""
    header, *rows = against_groups(pairs)
    before, rest = page.split(MARKS[0], 1)
    return before + f"{MARKS[0]}\n\n{table(header, rows)}\n\n" + MARKS[1] + rest.split(MARKS[1], 1)[1]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(*header), _row(*["---"] * len(header)), *(_row(*row) for row in rows)])


def _section(switch: Switch) -> str:
    """Return the section of one switch: its flags, then what it needs, its receipts and its rules."""
    fields = dataclasses.fields(switch.options)
    facts = [f"- `{spelling(f.name)}`: {f.metadata['help']}" for f in fields]
    facts = facts or ["- computed from `--micro-batch-size` and `--global-batch-size`"]
    facts += [
        f"- `--{alias}` is the same as `{spelling(f.name)}{f' {value}' if value else ''}`"
        for f in fields
        for alias, value in f.metadata["aliases"].items()
    ]
    if len(switch.templates) < len(TEMPLATES):
        facts.append(f"- only in {', '.join(switch.templates)}")
    if switch.needs_package:
        facts.append(f"- needs `{switch.needs_package}`: {switch.install}")
    if switch.receipt:
        facts.append(f"- receipts: {', '.join(f'`{name}`' for name in switch.receipt)}")
    if switch.rules:
        facts.append(f"- rules: {', '.join(sorted(rule.code for rule in switch.rules))}")
    return f"## {switch.name}\n\n" + "\n".join(facts)


if __name__ == "__main__":
    folder, pairs = Path(sys.argv[1]), list(compatibility())
    parallelism = (folder / "parallelism.md").read_text(encoding="utf-8")
    for name, text in (*pages(pairs).items(), ("parallelism.md", filled(parallelism, pairs))):
        (folder / name).write_text(text, encoding="utf-8")
