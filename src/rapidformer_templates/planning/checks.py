"""Shapes of checks that several rules share."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rapidformer_templates.planning.changes import move
from rapidformer_templates.planning.switch import TEMPLATES, Finding, Request, Resource, Switch

PARTITIONING = "partitioning"  # the family of switches that divide the model's states over the workers


def needs_template(*names: str) -> Callable[[Request], list[Finding]]:
    """Each of the named switches works only in its own ``templates``."""

    def one(request: Request, switch: Switch) -> Finding:
        several = f"one of the templates {', '.join(TEMPLATES)}"
        needed = several if len(switch.templates) > 1 else f"the {switch.templates[0]} template"
        return Finding(
            f"{switch.name} needs {needed}",
            (*request.asked_for(switch.name), request.asked_template()),
            switches=(switch.name,),
            changes=tuple(move(request, template) for template in switch.templates),
        )

    def check(request: Request) -> list[Finding]:
        wanted = (request.active[name] for name in names if name in request.active)
        return [one(request, switch) for switch in wanted if request.environment.template not in switch.templates]

    return check


def one_claim(*resources: Resource) -> Callable[[Request], list[Finding]]:
    """Two active switches do not claim one of these resources."""

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
