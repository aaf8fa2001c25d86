"""Manual pages that are generated from the code while the site is built: switches, flags, rules, Python API."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import html
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rapidformer_templates
from rapidformer_templates.commands.catalogue import MATRIX_MACHINE, compatibility, explanation, with_additions
from rapidformer_templates.commands.plan import PlanFlags
from rapidformer_templates.planning.changes import spell
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_parser import build_parser
from rapidformer_templates.planning.registry import DOCUMENTS, REGISTRY, in_words, sources_of, switch_options
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import apply, choose_template
from rapidformer_templates.planning.switch import FORECAST, TEMPLATES, Request, Rule, Switch
from scripts.manual.catalogue import table

ACTS = "The switch changes memory or time. The loss and the weights stay the same as without it."
CHANGES = "The switch changes the result, not only memory or time. Compare runs that use it with each other."
JOBS: Sequence[Mapping[str, str]] = (
    {"task": "pretraining", "model_type": "gpt2"},
    {"task": "causal_lm"},
    {"task": "causal_lm", "device": "cuda"},
)
ORDER = "[order of application](../switches.md#catalogue-in-the-order-of-application)"
KINDS = dict(zip(FORECAST, ("parameters", "gradients", "optimizer state", "activations", "time"), strict=True))


def switch_page(switch: Switch) -> str:
    """Return the page of a switch, with all facts from its declaration."""
    package = f"`{switch.needs_package}` (`{switch.install}`)"
    place = list(REGISTRY.switches).index(switch) + 1
    facts = [
        ("templates", ", ".join(switch.templates)),
        *([("needs", package)] if switch.needs_package else []),
        *([("takes over", ", ".join(sorted(claim.value for claim in switch.claims)))] if switch.claims else []),
        ("applied", f"{switch.precedence.name.lower()}, {place} of {len(REGISTRY.switches)} in the {ORDER}"),
        ("documented in", _sources(switch.source)),
    ]  # fmt: skip
    parts = [
        f"# {switch.name}",
        _text(switch.summary),
        table(("", ""), facts),
        "## Turn it on",
        f"```bash\n{example_command(switch)}\n```",
        CHANGES if switch.changes_result else ACTS,
        "## Flags",
        _flags(switch),
        "## Works with",
        _goes_with(switch),
        "## Receipt",
        _receipt(switch),
        "## Prediction",
        _prediction(switch),
    ]
    if switch.rules:
        parts += ["## Rules", *(_rule(rule) for rule in switch.rules)]
    return "\n\n".join(parts) + "\n"


def example_command(switch: Switch) -> str:
    """Return a plan command with the switch and its requirements, on the simplest job that accepts it."""
    additions = with_additions(_alone(switch))[0]
    values = {**switch.on, **{name: value for change in additions for name, value in change.values.items()}}
    for job in JOBS:
        config = REGISTRY.complete(RunConfig()).replace("manual", **job, **values)
        template, _ = choose_template(config, REGISTRY)
        machine = dataclasses.replace(MATRIX_MACHINE, template=template, device=job.get("device", "cpu"))
        if not REGISTRY.refusals(build_request(config, machine, REGISTRY.switches)):
            return f"rapidformer plan {_words(job)} --world-size 8 \\\n    {_words(values)}"
    raise AssertionError(f"no job takes {switch.name}: add one to JOBS")


def _words(values: Mapping[str, Any]) -> str:
    """Format the values as flags for a shell."""
    switched = {True: "--", False: "--no-"}
    return " ".join(
        spelling(name).replace("--", switched[value]) if isinstance(value, bool)
        else f"{spelling(name)} {shlex.quote(str(value))}"
        for name, value in values.items()
    )  # fmt: skip


def _alone(switch: Switch) -> Request:
    config = REGISTRY.complete(RunConfig()).replace("manual", **switch.on)
    machine = dataclasses.replace(MATRIX_MACHINE, template=switch.templates[0])
    return build_request(config, machine, REGISTRY.switches)


def _flags(switch: Switch) -> str:
    rows = [
        (
            f"`{spelling(f.name)}`",
            _text(f.metadata["help"]),
            ", ".join(f"`--{alias}{f' {value}' if value else ''}`" for alias, value in f.metadata["aliases"].items()),
        )
        for f in dataclasses.fields(switch.options)
    ]
    if not rows:
        return "There is no separate flag. The value follows from `--micro-batch-size` and `--global-batch-size`."
    if any(alias for *_, alias in rows):
        return table(("flag", "what it does", "the same as"), rows)
    return table(("flag", "what it does"), [row[:2] for row in rows])


def _goes_with(switch: Switch) -> str:
    together: dict[str, list[str]] = defaultdict(list)
    for other, cell in _cells(switch):
        value = f" (`{spell(other.on)}`)" if other.name == "optimizer" else ""
        link = f"[{other.name}]({other.name}.md){value}"
        if cell == "–":
            together["Never"].append(link)
            continue
        templates = [template for template in TEMPLATES if template[0] in cell]
        where = "Yes" if set(templates) == set(switch.templates) else f"In {' and '.join(templates)}"
        together[where + (", with the flags that one of them requires" if cell.endswith("+") else "")].append(link)
    ordered = sorted(together.items(), key=lambda item: (item[0] == "Never", item[0] != "Yes", item[0]))
    return table(("together", "with"), [(f"**{where}**", ", ".join(names)) for where, names in ordered])


def _cells(switch: Switch) -> Iterator[tuple[Switch, str]]:
    """Yield each other switch, with its cell of the table of pairs."""
    rows = _pairs()
    own = list(REGISTRY.switches).index(switch)
    for i, other in enumerate(REGISTRY.switches):
        if i != own:
            yield other, rows[max(i, own)][min(i, own)]


@functools.cache
def _pairs() -> Sequence[Sequence[str]]:
    return [[pair.cell for pair in row] for row in compatibility()]


def _receipt(switch: Switch) -> str:
    if not switch.receipt:
        return "The measurements of every run ([summary.json](../run-folder.md)) show its effect."
    names = ", ".join(f"`{name}`" for name in switch.receipt)
    return (
        f"`summary.json` has {names}, measured on the running model. If the switch had no effect in the first step, "
        "the run ends with an error that names the missing effect."
    )


def _prediction(switch: Switch) -> str:
    """Describe what `plan --auto-strategy` predicts for it."""
    alone = _alone(switch)
    unknown = switch.predicts.unknown(apply(alone, with_additions(alone)[0], REGISTRY))
    rows = [
        (KINDS[kind], _text(switch.predicts.predicted.get(kind, "")) or f"not predicted: {_text(unknown[kind])}")
        for kind in FORECAST
        if kind in switch.predicts.predicted or kind in unknown
    ]
    if not rows:
        return "The [planner](../planner.md) predicts the same memory and time as without it."
    rest = "Everything else is predicted to stay the same."
    return f"The [planner](../planner.md) predicts these changes. {rest}\n\n" + table(("per worker", ""), rows)


def _sources(source: str) -> str:
    """Return the sources of a declaration, with links."""
    links = {letter: document.link for letter, document in DOCUMENTS.items()}
    words = [(in_words(f"[{part}]"), links.get(part)) for part in sources_of(source)]
    return ", ".join(f"[{name}]({link})" if link else name for name, link in words)


def _rule(rule: Rule) -> str:
    title, why = _text(rule.title.rstrip(".")), _text(rule.why)
    return f"**[{rule.code}](../rules/{rule.code}.md)** {title}: {why} ({in_words(rule.source)})"


def rule_page(rule: Rule, switches: Sequence[str]) -> str:
    """Return the page of a rule: the reason for it, an example, and what to do instead."""
    found = explanation(rule)
    machine = f"\n\nOn a machine with {_text(found.machine)}." if found.machine else ""
    instead = [(f"`{suggestion.change}`", _text(suggestion.note)) for suggestion in found.instead]
    links = ", ".join(f"[{name}](../switches/{name}.md)" for name in switches)
    parts = [
        "---\nsearch: {boost: 0.2}\n---",  # short pages would come before those about the subject
        f"# {rule.code}: {_text(rule.title.rstrip('.'))}",
        *([f"It is a rule of {links}."] if links else []),
        "## Why",
        f"{_text(found.why)} Source: {_sources(rule.source)}.",
        "## Example",
        f"```console\n$ {found.command}\n{found.answer}\n```{machine}",
        "## What to do instead",
        table(("change", "remark"), instead) if instead else "Nothing: the run starts.",
        "[All rules](../rules.md)",
    ]
    return "\n\n".join(parts) + "\n"


def _switches_of_rules() -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for switch in REGISTRY.switches:
        for rule in switch.rules:
            found[rule.code].append(switch.name)
    return found


def flags_page() -> str:
    """Return the page with every flag by topic, as in ``rapidformer --help-all``."""
    parts = [
        "# Flags",
        "Every flag is accepted with dashes or underscores, and as a key of the YAML file of `--config`. A flag on the "
        "command line wins over the file. `rapidformer --help-all` prints the same.",
    ]
    for group in _parser()._action_groups:
        rows = [_flag_row(action) for action in group._group_actions if action.option_strings and action.dest != "help"]
        if rows:
            parts += [f"## {group.title}", table(("flag", "value", "what it does"), rows)]
    return "\n\n".join(parts) + "\n"


def _parser() -> argparse.ArgumentParser:
    return build_parser("rapidformer", switch_options().values(), PlanFlags, "")


def _flag_row(action: Any) -> Sequence[str]:
    names = [name for name in action.option_strings if "_" not in name and not name.startswith("--no-")]
    value = (action.metavar or "").strip("{}").replace(",", ", ")  # choices, with spaces so that the line can break
    return ", ".join(f"`{name}`" for name in names), f"`{value}`" if value else "", _text(action.help or "")


def api_page() -> str:
    """Return the page with every name that ``import rapidformer_templates`` provides, for mkdocstrings."""
    parts = [
        "# Python API",
        "The public names of `import rapidformer_templates`. Other names can change in any version. "
        "[Templates](../white-box.md) shows how to use them.",
    ]
    home = rapidformer_templates._HOME
    parts += [
        f"::: {home[name]}.{name}\n    options:\n      heading: {name}\n      toc_label: {name}"
        for name in rapidformer_templates.__all__
        if name in home
    ]
    return "\n\n".join(parts) + "\n"


def _text(words: str) -> str:
    """Escape plain text for Markdown."""
    return html.escape(words, quote=False).replace("*", "\\*").replace("--", "\\-\\-").replace("|", "\\|")


def generated() -> Mapping[str, str]:
    """Return the text of each generated page by its path."""
    pages = {f"switches/{switch.name}.md": switch_page(switch) for switch in REGISTRY.switches}
    by_rule = _switches_of_rules()
    rules = {f"rules/{rule.code}.md": rule_page(rule, by_rule[rule.code]) for rule in REGISTRY.all_rules}
    return {**pages, **rules, "reference/flags.md": flags_page(), "reference/api.md": api_page()}
