"""The class and the options of a run's optimizer, and the rules about its flags. Does not import torch."""

from __future__ import annotations

from rapidformer_templates.planning.changes import drop, replace
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.flags import decays_in_the_gradient
from rapidformer_templates.planning.optimizers import (
    ADAMW,
    BETAS,
    CPU_ADAM,
    FUSED_ADAMW,
    OPTIMIZERS,
    OptimizerClass,
    OptimizerFacts,
)
from rapidformer_templates.planning.switch import Finding, Request, Resource

ADAM_FLAGS = ("adam_beta1", "adam_beta2", "adam_epsilon")


def facts_of(request: Request) -> OptimizerFacts:
    """Return the record of the chosen optimizer."""
    return OPTIMIZERS[request.config.get("optimizer")]


def implementation(request: Request) -> OptimizerClass:
    """Return the class that makes the updates in this run. For apex's classes it may be the fallback."""
    facts = facts_of(request)
    if on_host_by_deepspeed(request):
        return CPU_ADAM
    chosen = facts.fallback if facts.fallback and fallback_reason(request) else facts.implementation
    return chosen.l2 if isinstance(chosen.l2, OptimizerClass) and decays_in_the_gradient(request) else chosen


def optimizer_options(request: Request) -> dict[str, object]:
    """Return the options of that class other than learning rate and weight decay.

    Options not listed keep its defaults.
    """
    training = request.config.training
    options: dict[str, object] = {}
    if training.adam_beta1 is not None or training.adam_beta2 is not None:
        betas = zip((training.adam_beta1, training.adam_beta2), facts_of(request).betas or BETAS, strict=True)
        options["betas"] = tuple(default if beta is None else beta for beta, default in betas)
    if training.adam_epsilon is not None:
        options["eps"] = training.adam_epsilon
    l2 = implementation(request).l2
    return options | {l2: False} if isinstance(l2, str) and decays_in_the_gradient(request) else options


def on_host_by_deepspeed(request: Request) -> bool:
    """Return whether DeepSpeed updates an offloaded AdamW state, for which it has a vectorized class."""
    facts = facts_of(request)
    is_adamw = facts.implementation in (ADAMW, FUSED_ADAMW) or facts.fallback is FUSED_ADAMW
    by_deepspeed = any(name.startswith("zero-") and switch.engine for name, switch in request.active.items())
    return is_adamw and by_deepspeed and bool(request.of_family("offload"))


def fallback_reason(request: Request) -> str | None:
    """Return why apex's class cannot be used in this run, or None if it can."""
    if "apex" not in request.environment.packages:
        return "Nvidia apex is not installed"
    if request.environment.device != "cuda":
        return "Nvidia apex runs on a GPU only"
    if request.of_family("offload"):
        return "Nvidia apex cannot update a state in host memory"
    if any(Resource.PARAMETERS in switch.claims for switch in request.active.values()):
        return "Nvidia apex does not accept sharded parameters"
    return None


def refusal(request: Request, message: str, *switches: str) -> Finding:
    """Refuse the chosen optimizer and suggest the default, which runs everywhere."""
    flags = (*request.asked("optimizer"), *request.asked_for(*switches))
    return Finding(message, flags, switches=switches, changes=(replace({"optimizer": "adamw"}),))


def has_no_such_option(request: Request) -> list[Finding]:
    """Refuse Adam's decays and epsilon for an optimizer that does not have that option."""
    facts = facts_of(request)
    supported = (facts.betas, facts.betas, facts.epsilon)
    fields = [
        field
        for field, default in zip(ADAM_FLAGS, supported, strict=True)
        if default is None and request.config.get(field) is not None
    ]
    if not fields:
        return []
    message = f"{facts.name} has no {' and no '.join(map(spelling, fields))}"
    changes = (replace({"optimizer": "adamw"}), drop(dict.fromkeys(fields)))
    return [Finding(message, request.asked("optimizer", *fields), changes=changes)]


def betas_reach_one(request: Request) -> list[Finding]:
    """Refuse a decay of 1, with which a moment would ignore all gradients."""
    return [
        Finding(
            f"{spelling(name)} must be below 1, not {value:g}",
            request.asked(name),
            changes=(replace({name: default}), drop({name: None})),
        )
        for name, default in zip(ADAM_FLAGS, BETAS, strict=False)
        if (value := request.config.get(name)) is not None and not value < 1
    ]


def missing_package(request: Request) -> list[Finding]:
    """Refuse the chosen optimizer if its package is not installed."""
    facts = facts_of(request)
    if facts.package is None or facts.package.name in request.environment.packages:
        return []
    message = f"{facts.name} needs {facts.package.name}, which is not installed: {facts.package.install}"
    return [refusal(request, message)]
