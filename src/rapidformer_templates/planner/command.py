"""``rapidformer plan --auto-strategy``, and the layout that a training command takes."""

from __future__ import annotations

from rapidformer_templates.config import RunConfig
from rapidformer_templates.environment import Environment
from rapidformer_templates.errors import Refused, RapidformerError
from rapidformer_templates.planner.hardware import Hardware, find_hardware
from rapidformer_templates.planner.search import Found, Search
from rapidformer_templates.planner.show import print_json, show
from rapidformer_templates.planner.subject import Subject
from rapidformer_templates.switches import REGISTRY, Registry, resolve
from rapidformer_templates.switches.mixed_precision import precision


class NothingFits(RapidformerError):
    """No layout of the workers fits the model."""


def search(config: RunConfig, environment: Environment, registry: Registry = REGISTRY) -> tuple[Found, Hardware]:
    """All layouts, and the devices that they are for.

    Raises:
        Refused: a rule is broken that no layout could mend.
        ModelError: the model cannot be built.
        ConfigError: the memory of the devices is not known.
    """
    _check_what_layouts_do_not_change(config, environment, registry)
    hardware = find_hardware(environment, precision(registry.complete(config), environment))
    subject = Subject(config, gpu=environment.device == "cuda")
    return Search(config, environment, subject, hardware, registry).run(), hardware


def _check_what_layouts_do_not_change(config: RunConfig, environment: Environment, registry: Registry) -> None:
    """Refuse what is wrong with the rest of the flags, with the usual message."""
    open_sizes = {"micro_batch_size": 1, "global_batch_size": None}
    resolve(registry.complete(config).replace("default", **open_sizes), environment, registry)


def plan_command(config: RunConfig, environment: Environment, *, as_json: bool) -> int:
    """Search and print; the exit status: 1 if nothing fits."""
    found, hardware = search(config, environment)
    if as_json:
        print_json(found, hardware)
    else:
        show(found, hardware)
    return 0 if found.layouts else 1
