"""Chooses the template of a black-box run, and the defaults of each template. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.request import build_request

TEMPLATE_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "Trainer": {},
    "Pretrainer": {"task": "pretraining"},
    "Finetuner": {},  # the task decides the defaults of fine-tuning, so they are the same in every template
}
"""Flags that a template sets if nothing else does, by the template's name."""


def choose_template(config: RunConfig, registry: Registry = REGISTRY) -> tuple[str, str]:
    """Return the template of a black-box run and the reason: ``--template``, or the switches, or the task.

    Returns:
        The name and where it comes from, such as ``command line`` or ``task pretraining``.
    """
    if config.launch.template:
        return config.launch.template, config.origin("template")
    task = config.training.task
    usual = "Pretrainer" if task == "pretraining" else "Finetuner"
    request = build_request(registry.complete(config), Environment(), registry.switches)
    needing = [
        switch.name
        for switch in request.active.values()
        if "Trainer" in switch.templates and usual not in switch.templates
    ]
    if needing:
        return "Trainer", f"chosen for {', '.join(needing)}"
    return usual, f"chosen for task {task}" if task else "chosen because no task is given"


def with_template_defaults(config: RunConfig, template: str) -> RunConfig:
    """Return the configuration with the template's defaults for flags without a value."""
    preferred = {name: value for name, value in TEMPLATE_DEFAULTS[template].items() if name not in config.origins}
    return config.replace(template, **preferred) if preferred else config
