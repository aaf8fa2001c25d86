"""From a template class and a command line to its configuration and its plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer_templates.config import RunConfig, parse
from rapidformer_templates.environment import detect
from rapidformer_templates.launch import is_worker
from rapidformer_templates.plan import Plan
from rapidformer_templates.switches._registry import REGISTRY
from rapidformer_templates.switches._resolve import resolve
from rapidformer_templates.templates import TEMPLATE_DEFAULTS

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer


def library_template(template: type[Trainer]) -> str:
    """The name of the library's template that a class derives from."""
    return next(c.__name__ for c in template.__mro__ if c.__module__.startswith("rapidformer_templates."))


def read_config(template: type[Trainer], argv: Sequence[str], in_code: Mapping[str, tuple[Any, str]]) -> RunConfig:
    """The configuration of a template: command line over YAML over the script over the template.

    Raises:
        ConfigError: an unknown flag, or a value that cannot be used.
    """
    name = library_template(template)
    return parse(
        argv,
        REGISTRY.switch_options(),
        prog=Path(inspect.getsourcefile(template) or "rapidformer").name,
        description=(template.__doc__ or "").strip().splitlines()[0] if template.__doc__ else "",
        user=template.Flags,
        in_code=in_code,
        template_defaults={field: (value, name) for field, value in TEMPLATE_DEFAULTS.get(name, {}).items()},
    )


def resolve_plan(template: type[Trainer], config: RunConfig) -> Plan:
    """The plan of a training run.

    Raises:
        Refused: the flags break rules; all of them are named.
    """
    name = library_template(template)
    count = None if is_worker() else config.launch.nproc_per_node
    environment = detect(name, _origin(template), device=config.launch.device, world_size=count)
    return resolve(config, environment, training=True)


def _origin(template: type[Trainer]) -> str:
    """Where a class is defined: ``train.py:8``."""
    if template.__module__.startswith("rapidformer_templates."):
        return "black box"
    try:
        file = inspect.getsourcefile(template)
        return f"{Path(file).name}:{inspect.getsourcelines(template)[1]}" if file else template.__name__
    except (OSError, TypeError):
        return template.__name__  # typed at a prompt: there is no source
