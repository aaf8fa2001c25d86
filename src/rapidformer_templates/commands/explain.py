"""``rapidformer explain``: what a rule refuses, why, an example, and what to do instead."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.errors import Suggestion
from rapidformer_templates.planning.config import parse
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import Registry
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.sources import in_words
from rapidformer_templates.planning.suggest import nearest, to_suggestion
from rapidformer_templates.planning.switch import Request, Rule

NAMES = re.compile(r"--|peft|tf32|torch")
"""First words of a reason that stay in lower case."""


@dataclass(frozen=True)
class Explanation:
    """The four parts of the explanation of a rule.

    Attributes:
        refuses: what the rule refuses.
        why: the reason, as a sentence.
        source: where the reason comes from.
        command: a command that breaks the rule.
        machine: facts of the machine on which the command breaks it, or an empty text.
        answer: the answer to the command: the error or the note, and the flags that it is about.
        instead: the nearest commands that work. Empty if the rule only adds a note to the plan.
    """

    refuses: str
    why: str
    source: str
    command: str
    machine: str
    answer: str
    instead: Sequence[Suggestion]


def explanation(rule: Rule, registry: Registry) -> Explanation:
    """Break the rule with its example, and return what happens."""
    request = example_request(rule, registry)
    finding = rule.check(request)[0]
    answer = f"error[{rule.code}]: {finding.message}" if rule.refuses else f"note: {finding.message}"
    if rule.refuses and finding.asked:
        answer += f"\n  asked  {', '.join(finding.asked)}"
    why = rule.why if NAMES.match(rule.why) else rule.why[:1].upper() + rule.why[1:]
    return Explanation(
        refuses=rule.refusal or f"{finding.message[:1].upper()}{finding.message[1:]}.",
        why=f"{why}.",
        source=in_words(rule.source),
        command=f"{'rapidformer' if rule.example.training else 'rapidformer plan'} {rule.example.flags}",
        machine=", ".join(f"{name} {value}" for name, value in rule.example.machine.items()),
        answer=answer,
        instead=tuple(to_suggestion(path) for path in nearest(request, registry)) if rule.refuses else (),
    )


def explain(code: str, registry: Registry) -> str:
    """Return the explanation of a rule as a text for a terminal."""
    rule = next(rule for rule in registry.all_rules if rule.code == code)
    entry = explanation(rule, registry)
    width = max((len(suggestion.change) for suggestion in entry.instead), default=0)
    sections = {
        "What it refuses": [entry.refuses],
        "Why": [entry.why, f"Source: {entry.source}."],
        "Example": [
            f"$ {entry.command}" + (f"   # on a machine with {entry.machine}" if entry.machine else ""),
            *entry.answer.splitlines(),
        ],
        "What to do instead": [f"{s.change:<{width}}  {s.note}".rstrip() for s in entry.instead]
        or ["Nothing: the run starts."],
    }
    parts = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()]
    return "\n\n".join([f"{rule.code}: {rule.title}", *parts])


def example_request(rule: Rule, registry: Registry) -> Request:
    """Return the request of a rule's example, parsed in the same way as by ``rapidformer plan``."""
    from rapidformer_templates.commands.main import PlanFlags
    from rapidformer_templates.planning.templates import choose_template

    parsed = parse(shlex.split(rule.example.flags), registry.options(), user=PlanFlags)
    workers = parsed.user.world_size or 1
    config = dataclasses.replace(parsed, user=None)
    template, origin = choose_template(config, registry)
    environment = Environment(template=template, template_origin=origin, world_size=workers, local_world_size=workers)
    environment = dataclasses.replace(environment, **rule.example.machine)
    return build_request(config, environment, registry.switches, training=rule.example.training)
