"""Checks of requests and of the first step that several switches share. Does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rapidformer_templates.planning.changes import Change, drop, move, replace
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.switch import TEMPLATES, Finding, Measured, Request, Resource, RuleList, Switch

PARTITIONING = "partitioning"  # the family of switches that divide the model's states over the workers


def partitions_without_zero(switch: Switch) -> bool:
    """Whether a switch divides the model's states without ZeRO."""
    return switch.family == PARTITIONING and not switch.name.startswith("zero-")


@dataclass(frozen=True)
class Given:
    """A flag that is given, as one side of a rule.

    Attributes:
        field: the field of the flag.
        values: the values that count. Empty if all do, except the default and False.
        instead: the changes that choose another value. None chooses its default.
    """

    field: str
    values: tuple[object, ...] = ()
    instead: tuple[Change, ...] | None = None


ENCODER_DECODER = Given("task", ("seq2seq_lm",), instead=())
"""The task that trains an encoder and a decoder. A run for another task is another run."""

Side: TypeAlias = "str | Resource | Given | Callable[[Switch], bool] | tuple[Side, ...] | Mapping[str, str]"
"""One side of a rule: the name of a switch or family, a claimed resource, a given flag, a predicate, or a tuple of
sides.

A mapping of names adds to each the reason why the other side excludes it.
"""


TOGETHER, TOGETHER_REVERSED = "{0} does not work together with {1}", "{1} does not work together with {0}"


def clash(request: Request, *sides: Side, message: str = TOGETHER) -> list[Finding]:
    """Find the active switches and given flags of all sides, which exclude each other.

    The switch that came later has the rule. So no switch names a newer one, and a switch takes all of its exclusions
    along if its folder is removed.

    Args:
        message: what is wrong, with a place for each side.
    """
    return [
        Finding(
            message.format(*(party.name for party in parties)) + "".join(party.reason for party in parties),
            sum((party.flags for party in parties), ()),
            switches=sum((party.switches for party in parties), ()),
            changes=sum((party.changes for party in parties), ()),
        )
        for parties in itertools.product(*(_parties(request, side) for side in sides))
    ]


def needs(request: Request, one: Side, other: Side, *ways: Change, message: str | None = None) -> list[Finding]:
    """Find the active switches and given flags of one side, if nothing of the other side is there.

    Args:
        ways: changes that add the other side. By default, the message names the first one.
        message: what is wrong, with a place for the first side.
    """
    if _parties(request, other):
        return []
    message = message or f"{{}} needs {ways[0].describe}"
    return [
        Finding(message.format(party.name), party.flags, party.switches, (*ways, *party.changes))
        for party in _parties(request, one)
    ]


def needs_template(request: Request, *names: str) -> Iterator[Finding]:
    """Find those of the named switches that are active outside of their ``templates``."""
    environment = request.environment
    template = f"template {environment.template or 'none'} ({environment.template_origin})"
    for switch in (request.active[name] for name in names if name in request.active):
        if environment.template not in switch.templates:
            several = f"one of the templates {', '.join(TEMPLATES)}"
            needed = several if len(switch.templates) > 1 else f"the {switch.templates[0]} template"
            message = f"{switch.name} needs {needed}"
            changes = tuple(move(request, template) for template in switch.templates)
            yield Finding(
                message, (*request.asked_for(switch.name), template), switches=(switch.name,), changes=changes
            )


def one_claim(request: Request, *resources: Resource) -> Iterator[Finding]:
    """Find pairs of active switches that claim the same one of these resources."""
    for a, b in itertools.combinations(request.active.values(), 2):
        shared = [resource.value for resource in resources if resource in a.claims & b.claims]
        if shared:
            message = f"{a.name} and {b.name} both take over {shared[0]}"
            yield Finding(message, request.asked_for(a.name, b.name), switches=(a.name, b.name))


def nearest_divisor(name: str, size: int, fits: Callable[[int], bool]) -> tuple[Change, ...]:
    """Suggest the largest size above one and at most ``size`` that fits, if there is one."""
    best = next((n for n in range(size, 1, -1) if fits(n)), None)
    return (replace({name: best}),) if best else ()


@dataclass(frozen=True)
class _Party:
    """An active switch or a given flag on one side of a rule.

    Attributes:
        name: how a message names it.
        flags: how the user turned it on.
        reason: words at the end of the message.
        switches, changes: see :class:`Finding`.
    """

    name: str
    flags: tuple[str, ...]
    reason: str = ""
    switches: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


def _parties(request: Request, side: Side) -> list[_Party]:
    if isinstance(side, tuple):
        return [party for part in side for party in _parties(request, part)]
    if isinstance(side, Given):
        config, name = request.config, side.field
        value, default, section = config.get(name), config.default(name), config.section_of(name)
        counts = value in side.values if side.values else value is not False and value != default
        if not counts or (section in config.switches and section not in request.active):
            return []
        flag = spelling(name) if value is True else f"{spelling(name)} {value}"
        changes = (drop({name: default}),) if side.instead is None else side.instead
        return [_Party(flag, request.asked(name), changes=changes)]
    if isinstance(side, Mapping):
        reasons = {name: f", which {why}" for name, why in side.items() if name in request.active}
    else:
        reasons = {name: "" for name, switch in request.active.items() if _is_on_side(switch, side)}
    return [_Party(name, request.asked_for(name), reason, (name,)) for name, reason in reasons.items()]


def _is_on_side(switch: Switch, side: str | Resource | Callable[[Switch], bool]) -> bool:
    if isinstance(side, str):
        return side in (switch.name, switch.family)
    return side in switch.claims if isinstance(side, Resource) else side(switch)


def idle_without_copies(note: str) -> Callable[[Request], tuple[str, ...]]:
    """Build the note of a switch that has nothing to do if no other worker has the same parameters."""
    return lambda request: (note,) if request.sizes.copies == 1 else ()


OFFLOAD_RULES = RuleList()


@OFFLOAD_RULES.add("RF012", "[D]", "--cpu-offload --optimizer lamb")
def _optimizer_has_cpu_form(request: Request) -> Iterator[Finding]:
    """An offloaded optimizer needs both a CPU and a GPU implementation.

    Why: an offloaded state is updated on the CPU, for which LAMB and the GPU-only optimizers have no kernel.
    """
    optimizer, offloads = optimizer_facts(request), tuple(switch.name for switch in request.of_family("offload"))
    if not optimizer.cpu_form:
        message = f"{optimizer.name} cannot be offloaded: it has no CPU implementation"
        flags = (*request.asked("optimizer"), *request.asked_for(*offloads))
        yield Finding(message, flags, switches=offloads, changes=(replace({"optimizer": "adamw"}),))


PADDING = 128
"""Number of elements per worker that an engine may add to its share as padding."""


def data_parallel(measured: Measured) -> int:
    """Return the number of workers that have copies of the model, or a share of one."""
    return measured.plan.sizes.copies


def check_even_shards(
    *, whole_at_borders: bool = False, among: Callable[[Measured], int] = data_parallel, **quantities: str
) -> Callable[[Measured], str | None]:
    """Build a check that each named measurement is split evenly over the copies of a replica.

    ``quantities`` maps a measurement to the name of what it counts the elements of.

    Args:
        whole_at_borders: whether two workers hold a parameter whole if it is on the border between their shares.
        among: returns the number of workers that have one share each.
    """

    def acted(measured: Measured) -> str | None:
        shares, whole = among(measured), sum(measured.all("trained_elements"))
        on_two_workers = (shares - 1) * (measured["largest_parameter"] or 0) if whole_at_borders else 0
        # Even shares add up to one whole copy. A sum more than halfway from there to whole copies on all workers
        # cannot come from rounding.
        expected = min(whole / shares + on_two_workers, whole)
        for name, what in quantities.items():
            numbers = measured.all(name)
            if shares > 1 and not (numbers and sum(numbers) <= (expected + whole) / 2 + PADDING * len(numbers)):
                counts = ", ".join(f"{count:,}" for count in numbers) or "nothing"
                elements = f"{whole // measured.plan.sizes.copies:,} elements in all"
                return f"{shares} shares of the {what}, {elements}, were expected; the workers have {counts}"
        return None

    return acted


def divides_parameters(measured: Measured) -> str | None:
    """Check that some worker has only a part of a parameter."""
    if measured.plan.sizes.copies == 1 or any(measured.all("divided_elements")):
        return None
    return "parameters sharded over the workers were expected; every worker has whole parameters"


def first_finding(*checks: Callable[[Measured], str | None]) -> Callable[[Measured], str | None]:
    """Combine checks: return the first finding."""

    def acted(measured: Measured) -> str | None:
        return next((sentence for check in checks if (sentence := check(measured))), None)

    return acted


def shown(value: object) -> str:
    """Format a measurement for a message."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
