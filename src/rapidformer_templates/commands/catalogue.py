"""``rapidformer switches`` and ``explain``: which switches go together, and what each rule says."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.errors import ConfigError, Suggestion, lines_of
from rapidformer_templates.planning.changes import ADD, Change
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, Environment
from rapidformer_templates.planning.flag_parser import CommandParser, parse
from rapidformer_templates.planning.registry import REGISTRY, in_words
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import apply, nearest, to_suggestion
from rapidformer_templates.planning.switch import TEMPLATES, Request, Rule, Switch
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
    """Print the catalogue and the matrix of the switches.

    Args:
        argv: words after ``rapidformer switches``.
    """
    from rich.table import Table

    build_parser().parse_args(argv)
    catalogue = Table("", "switch", "flags", "what it does", "source", title="Switches, in order of application")
    for number, switch in enumerate(REGISTRY.switches, 1):
        flags = flags_of(switch).replace("`", "")
        catalogue.add_row(str(number), switch.name, flags, switch.summary, in_words(switch.source))
    console(piped_width=140).print(catalogue)
    rows = [[pair.cell for pair in row] for row in compatibility()]
    print("\nTwo at a time: T Trainer, P Pretrainer, F Finetuner, + if what one of them requires is added, – never")
    print(" " * 26 + "".join(f"{number:<4}" for number in range(1, len(rows) + 1)))
    for number, (switch, cells) in enumerate(zip(REGISTRY.switches, rows, strict=True), 1):
        print(f"{number:>2} {switch.name:<23}" + "".join(f"{cell:<4}" for cell in cells))
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


def compatibility_of(*switches: Switch) -> CompatibilityTable:
    """Check a run with these switches against the rules, in every template."""
    values = {name: value for switch in switches for name, value in switch.on.items()}
    config = REGISTRY.complete(RunConfig()).replace("matrix", **values)
    letters, needs_additions, refusals = "", False, []
    for template in TEMPLATES:
        environment = dataclasses.replace(MATRIX_MACHINE, template=template)
        additions, rules = with_additions(build_request(config, environment, REGISTRY.switches))
        if rules:
            refusals.append(rules)
        else:
            letters += template[0]
            needs_additions |= bool(additions)
    return CompatibilityTable(letters, needs_additions, () if letters else min(refusals, key=len))


def with_additions(request: Request) -> tuple[list[Change], tuple[Rule, ...]]:
    """Return the changes that the request needs to be accepted, and the rules that it breaks even with them."""
    changes: list[Change] = []
    while refusals := REGISTRY.refusals(apply(request, changes, REGISTRY)):
        possible = (change for _, finding in refusals for change in finding.changes)
        change = next((one for one in possible if one.cost == ADD and one not in changes), None)
        if change is None:
            return changes, tuple({rule.code: rule for rule, _ in refusals}.values())
        changes.append(change)
    return changes, ()


def compatibility() -> Iterator[list[CompatibilityTable]]:
    """Yield, for each switch, its compatibility with each switch up to itself."""
    for i, switch in enumerate(REGISTRY.switches):
        yield [compatibility_of(switch, other) for other in REGISTRY.switches[: i + 1]]


def flags_of(switch: Switch) -> str:
    return " ".join(f"`{spelling(name)}`" for name in switch.fields) or "computed from the two batch sizes"


NAMES = re.compile(r"--|peft|tf32|torch")
"""First words of a reason that stay in lower case."""


def explain_main(argv: Sequence[str]) -> int:
    """Print the explanation of a rule, or the titles of all rules or of those about a subject.

    Args:
        argv: words after ``rapidformer explain``: the code as declared, or ``6``, ``rf6`` or ``RF06`` for ``RF006``, or
            a word of titles, such as ``fsdp``.

    Raises:
        ConfigError: there is no such rule.
    """
    word = " ".join(argv)
    code = word.upper()
    if parts := re.fullmatch(r"([A-Z]*)(\d+)", code):
        code = f"{parts[1] or 'RF'}{int(parts[2]):03}"
    if any(rule.code == code for rule in REGISTRY.all_rules):
        print(explain(code))
        return 0
    of_switch = [rule for switch in REGISTRY.switches if switch.name == word.lower() for rule in switch.rules]
    about = [rule for rule in REGISTRY.all_rules if rule in of_switch or word.lower() in rule.title.lower()]
    if not about:
        raise ConfigError(f"there is no rule {word}", hint="rapidformer explain lists all rules, and explains RF006")
    print("\n".join(f"{rule.code}  {rule.title}" for rule in about))
    return 0


def explain_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer explain``, for its help and for completion."""
    about = "Print a rule, the reason for it, an example that breaks it, and what to do instead."
    parser = CommandParser(prog="rapidformer explain", description=about, epilog="example: rapidformer explain RF006")
    text = "code of the rule, such as RF006 or 6, or a word of titles (default: list all rules)"
    parser.add_argument("code", nargs="?", metavar="CODE", help=text)
    return parser


@dataclass(frozen=True)
class Explanation:
    """The parts of the explanation of a rule.

    Attributes:
        why: the reason, as a sentence.
        source: where the reason comes from.
        command: a command that breaks the rule.
        machine: facts of the machine on which the command breaks it, or an empty text.
        answer: the answer to the command: the error or the note, and the flags that it is about.
        instead: the nearest commands that work. Empty if the rule only adds a note to the plan.
    """

    why: str
    source: str
    command: str
    machine: str
    answer: str
    instead: Sequence[Suggestion]


def explanation(rule: Rule) -> Explanation:
    """Break the rule with its example, and return what happens."""
    request = example_request(rule)
    finding = rule.check(request)[0]
    answer = f"error[{rule.code}]: {finding.message}" if rule.refuses else f"note: {finding.message}"
    if rule.refuses and finding.asked:
        answer += f"\n  asked  {', '.join(finding.asked)}"
    why = rule.why if NAMES.match(rule.why) else rule.why[:1].upper() + rule.why[1:]
    return Explanation(
        why=f"{why}.",
        source=in_words(rule.source),
        command=f"{'rapidformer' if rule.training else 'rapidformer plan'} {rule.example}",
        machine=", ".join(f"{name} {value}" for name, value in rule.machine.items()),
        answer=answer,
        instead=tuple(to_suggestion(path, request) for path in nearest(request, REGISTRY)) if rule.refuses else (),
    )


def explain(code: str) -> str:
    """Return the explanation of a rule as a text for a terminal."""
    rule = next(rule for rule in REGISTRY.all_rules if rule.code == code)
    entry = explanation(rule)
    sections = {
        "Why": [entry.why, f"Source: {entry.source}."],
        "Example": [
            f"$ {entry.command}" + (f"   # on a machine with {entry.machine}" if entry.machine else ""),
            *entry.answer.splitlines(),
        ],
        "What to do instead": lines_of(entry.instead) or ["Nothing: the run starts."],
    }
    parts = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()]
    return "\n\n".join([f"{rule.code}: {rule.title}", *parts])


def example_request(rule: Rule) -> Request:
    """Return the request of a rule's example, parsed in the same way as by ``rapidformer plan``."""
    from rapidformer_templates.commands.plan import PlanFlags
    from rapidformer_templates.planning.resolve import choose_template

    parsed = parse(shlex.split(rule.example), REGISTRY.options(), user=PlanFlags)
    workers = parsed.user.workers or 1
    config = dataclasses.replace(parsed, user=None)
    template, origin = choose_template(config, REGISTRY)
    environment = Environment(template=template, template_origin=origin, world_size=workers, local_world_size=workers)
    environment = dataclasses.replace(environment, **rule.machine)
    return build_request(config, environment, REGISTRY.switches, training=rule.training)
