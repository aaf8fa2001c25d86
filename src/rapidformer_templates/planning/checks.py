"""Checks of requests and of the first step that several switches share. Does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rapidformer_templates.planning.request import optimizer_facts
from rapidformer_templates.planning.switch import (
    TEMPLATES,
    Change,
    Example,
    Finding,
    Measured,
    Request,
    Resource,
    Rule,
    Switch,
    move,
    replace,
)

PARTITIONING = "partitioning"  # the family of switches that divide the model's states over the workers


def partitions_without_zero(switch: Switch) -> bool:
    """Whether a switch divides the model's states without ZeRO."""
    return switch.family == PARTITIONING and not switch.name.startswith("zero-")


def needs_template(*names: str) -> Callable[[Request], list[Finding]]:
    """Build a check that refuses each named switch outside of its ``templates``."""

    def one(request: Request, switch: Switch) -> Finding:
        several = f"one of the templates {', '.join(TEMPLATES)}"
        needed = several if len(switch.templates) > 1 else f"the {switch.templates[0]} template"
        environment = request.environment
        template = f"template {environment.template or 'none'} ({environment.template_origin})"
        return Finding(
            f"{switch.name} needs {needed}",
            (*request.asked_for(switch.name), template),
            switches=(switch.name,),
            changes=tuple(move(request, template) for template in switch.templates),
        )

    def check(request: Request) -> list[Finding]:
        active = (request.active[name] for name in names if name in request.active)
        return [one(request, switch) for switch in active if request.environment.template not in switch.templates]

    return check


@dataclass(frozen=True)
class FlagValues:
    """Values of a switch's flag, as one side of an exclusion.

    Attributes:
        field: the field of the flag.
        values: the excluded values.
        instead: the change that chooses another value.
    """

    field: str
    values: tuple[str, ...]
    instead: Change


Side: TypeAlias = "str | Resource | FlagValues | Callable[[Switch], bool] | tuple[Side, ...] | Mapping[str, str]"
"""One side of an exclusion: the name of a switch or family, a claimed resource, values of a flag, a predicate, or a
tuple of sides.

A mapping of names adds to each the reason why the other side excludes it.
"""


TOGETHER, TOGETHER_REVERSED = "{0} does not work together with {1}", "{1} does not work together with {0}"


def excludes(
    one: Side,
    other: Side,
    *,
    code: str,
    title: str,
    why: str,
    source: str,
    example: Example,
    refusal: str,
    message: str = TOGETHER,
    when: Callable[[Request], bool] | None = None,
    concerns: str = "",
) -> Rule:
    """Declare that two sides exclude each other.

    The switch that came later declares it. So no switch names a newer one, and a switch takes all of its exclusions
    along if its folder is removed.

    Args:
        code, title, why, source, example, refusal, concerns: see :class:`Rule`.
        message: what is wrong, with a place for each side.
        when: a further condition.
    """
    check = refuse_pair(one, other, message, when)
    return Rule(code, title, why, source, check, example, refusal=refusal, concerns=concerns)


def refuse_pair(
    one: Side, other: Side, message: str = TOGETHER, when: Callable[[Request], bool] | None = None
) -> Callable[[Request], list[Finding]]:
    """Build a check that refuses any active switch of one side with any of the other. See :func:`excludes`."""

    def check(request: Request) -> list[Finding]:
        if when is not None and not when(request):
            return []
        return [
            Finding(
                message.format(a.name, b.name) + b.reason,
                a.flags + b.flags,
                switches=a.switches + b.switches,
                changes=a.changes + b.changes,
            )
            for a in _parties(request, one)
            for b in _parties(request, other)
        ]

    return check


@dataclass(frozen=True)
class _Party:
    """An active switch, or a value of its flag, on one side of an exclusion.

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
    if isinstance(side, FlagValues):
        is_active, value = request.config.section_of(side.field) in request.active, request.config.get(side.field)
        chosen = is_active and value in side.values
        return [_Party(str(value), request.asked(side.field), changes=(side.instead,))] if chosen else []
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


def one_claim(*resources: Resource) -> Callable[[Request], list[Finding]]:
    """Build a check that refuses two active switches that claim one of these resources."""

    def check(request: Request) -> list[Finding]:
        claiming = [switch for switch in request.active.values() if not switch.claims.isdisjoint(resources)]
        findings = []
        for a, b in itertools.combinations(claiming, 2):
            shared = [resource.value for resource in resources if resource in a.claims & b.claims]
            if shared:
                message = f"{a.name} and {b.name} both take over {shared[0]}"
                findings.append(Finding(message, request.asked_for(a.name, b.name), switches=(a.name, b.name)))
        return findings

    return check


def has_no_cpu_form(request: Request) -> list[Finding]:
    """Refuse an offloaded optimizer that has no CPU implementation."""
    optimizer = optimizer_facts(request)
    offloads = [switch.name for switch in request.of_family("offload")]
    if optimizer.cpu_form:
        return []
    return [
        Finding(
            f"{optimizer.name} cannot be offloaded: it has no CPU implementation",
            (*request.asked("optimizer"), *request.asked_for(*offloads)),
            switches=tuple(offloads),
            changes=(replace({"optimizer": "adamw"}),),
        )
    ]


OPTIMIZER_HAS_CPU_FORM = Rule(
    "RF012",
    "An offloaded optimizer needs both a CPU and a GPU implementation.",
    "an offloaded state is updated on the CPU, for which LAMB and the GPU-only optimizers have no kernel",
    "[D]",
    has_no_cpu_form,
    Example("--cpu-offload --optimizer lamb"),
    refusal="Offload of an optimizer that has no CPU implementation, such as LAMB.",
)


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
