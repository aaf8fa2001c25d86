"""Convert a template class and a command line to a configuration and a plan."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.errors import ConfigError, Explained
from rapidformer_templates.planning.config import RunConfig, in_code, spelling
from rapidformer_templates.planning.environment import Environment, detect
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.hub import prepare_config
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import choose_template, resolve, with_template_defaults
from rapidformer_templates.planning.switch import TEMPLATES
from rapidformer_templates.run import scripts
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.scripts import check_arguments, check_names, overridden_hooks
from rapidformer_templates.system.launch import CHOSEN, is_worker

if TYPE_CHECKING:
    from rapidformer_templates.run.run import Template


def library_template(template: type[Template]) -> str:
    """Return the name of the library's template that a class derives from."""
    homes = {f"rapidformer_templates.{name.lower()}" for name in TEMPLATES}
    return next(c.__name__ for c in template.__mro__ if c.__module__ in homes)


def read_config(
    template: type[Template], argv: Sequence[str], arguments: Mapping[str, tuple[object, str]]
) -> RunConfig:
    """Return the configuration of a template. The command line overrides YAML, the script, and the template.

    Raises:
        ConfigError: a flag is unknown, or a value is invalid.
    """
    check_names(template)
    check_arguments(template)
    config = parse(
        argv,
        REGISTRY.options(),
        prog=_file(template) or "rapidformer",
        description=(template.__doc__ or "").strip().partition("\n")[0],
        user=template.Flags,
        in_code=arguments,
    )
    if "build_model" not in overridden_hooks(template):
        prepare_config(config.model)
    name = library_template(template)
    if config.launch.template not in (None, name):
        message = f"this script's template is {name}, not {config.launch.template}"
        hint = f"class {template.__name__}({config.launch.template}) is the way to change it"
        raise ConfigError(message, where=f"--template ({config.origin('template')})", hint=hint)
    config = _completed(config, name)
    if config.get("auto_strategy"):
        return _with_planned_layout(template, config, "auto_strategy")
    if config.get("pipeline_stages") == AUTO_MEMORY:
        return _with_planned_layout(template, config, "pipeline_stages")
    return config


@contextmanager
def errors_in_code(template: type[Template], *, enabled: bool) -> Iterator[None]:
    """Let errors inside the context speak of arguments (``resume=True``), not of flags (``--resume``)."""
    try:
        yield
    except Explained as error:
        if enabled:
            kinds = (*SECTIONS.values(), *REGISTRY.options().values(), *([template.Flags] if template.Flags else []))
            error.in_code = in_code(error.render(), kinds)
        raise


def complete_black_box(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the completed configuration of a run without user code, and its template. Does not search for a layout.

    Raises:
        ConfigError: a file that a flag names cannot be used.
    """
    prepare_config(config.model)
    template, _ = choose_template(config)
    return _completed(config, template), template


def _completed(config: RunConfig, template: str) -> RunConfig:
    """Add the values from files that switches read, and the defaults of the template.

    A run that torchrun has restarted resumes.
    """
    if config.launch.user_script:
        raise ConfigError("--user-script is for the rapidformer command", where=config.origin("user_script"))
    config = with_template_defaults(REGISTRY.merge_files(config), template)
    if config.training.save and RunFolder(config.training.save).is_of_restarted_launch():
        return config.replace("torchrun's restart", resume=True, overwrite=False)
    return config


def is_searched(config: RunConfig) -> bool:
    """Whether the planner chooses some of the values."""
    return bool(config.get("auto_strategy")) or config.get("pipeline_stages") == AUTO_MEMORY


AUTO_STRATEGY, AUTO_MEMORY = "auto-strategy", "auto-memory"
"""Origins of values that the planner has found."""

OF_A_MODEL = ("build_model", "build_data", "compute_loss", "build_optimizer")
"""Hooks that change the cost of a step."""

PLAN_ONE_LAYOUT = (
    "rapidformer plan --tokens 1B --user-script … predicts the memory of one layout: repeat it with the flags of others"
)
"""The hint for a search of a script with its own optimizer."""


def own_hooks_of_model(template: type[Template]) -> list[str]:
    """Return the hooks of a script that change the cost of a step."""
    return [hook for hook in OF_A_MODEL if hook in overridden_hooks(template)]


def _with_planned_layout(template: type[Template], config: RunConfig, requesting: str) -> RunConfig:
    """Add the planner's results to the configuration. ``requesting`` is the flag that requests them.

    Raises:
        ConfigError: the search cannot see the effect of the script's own hooks.
        Refused: the flags break rules, in every layout if one is searched for.
        NothingFits: no layout fits.
    """
    own = own_hooks_of_model(template)
    if scripts.is_planning() and "build_optimizer" not in own:
        return config  # the inspecting process searches
    if own:
        flag = spelling(requesting) + (f" {AUTO_MEMORY}" if requesting == "pipeline_stages" else "")
        hook, hint = own[0], f"rapidformer plan {flag} --user-script … plans it: pass the flags that it shows"
        if "build_optimizer" in own:
            hook, hint = "build_optimizer", PLAN_ONE_LAYOUT
        message = f"{flag} cannot see what {template.__name__}.{hook} makes"
        raise ConfigError(message, where=f"{flag} ({config.origin(requesting)})", hint=hint)
    if is_worker() and CHOSEN in os.environ:  # the process that started this one has searched
        chosen = json.loads(os.environ[CHOSEN])
        for name, (value, origin) in chosen["values"].items():
            config = config.replace(origin, **{name: value})
        return dataclasses.replace(config, chosen=tuple(chosen["lines"]))
    environment = _environment(template, config)
    if requesting == "auto_strategy":
        from rapidformer_templates.switches.auto_strategy.command import best_layout

        return config.replace(AUTO_STRATEGY, **best_layout(config, environment))
    from rapidformer_templates.switches.auto_strategy.stage_balance import with_stages_by_memory

    return with_stages_by_memory(config, environment)


def chosen_layout(config: RunConfig) -> dict[str, str]:
    """Return the results of the planner as environment variables for workers."""
    origins = {name: origin for name, origin in config.origins.items() if origin in (AUTO_STRATEGY, AUTO_MEMORY)}
    values = {name: (config.get(name), origin) for name, origin in origins.items()}
    return {CHOSEN: json.dumps({"values": values, "lines": config.chosen})} if values else {}


def _environment(template: type[Template], config: RunConfig) -> Environment:
    """Return the environment in which this process, or the workers that it will start, train."""
    return environment_of(template, config, None if is_worker() else config.launch.nproc_per_node)


def environment_of(
    template: type[Template], config: RunConfig, world_size: int | None, local_world_size: int | None = None
) -> Environment:
    """Return the environment of ``world_size`` workers. None reads it from this process's environment."""
    return detect(
        library_template(template),
        _origin(template, config),
        device=config.launch.device,
        world_size=world_size,
        local_world_size=local_world_size,
    )


def resolve_plan(template: type[Template], config: RunConfig, *, training: bool = True) -> Plan:
    """Return the plan of a training run, or of a session, which needs no folder and no number of steps.

    Raises:
        Refused: the flags break rules. The error names all of them.
    """
    return resolve(config, _environment(template, config), training=training)


def choose(argv: Sequence[str]) -> tuple[str, str]:
    """Return (template, reason) of a black-box run with these flags."""
    config = parse(argv, REGISTRY.options())
    prepare_config(config.model)
    return choose_template(config)


def _origin(template: type[Template], config: RunConfig) -> str:
    """Return where the template was chosen: ``train.py:8`` for a class, or the reason in a black-box run."""
    if template.__name__ == library_template(template):
        chosen, reason = choose_template(config)
        return reason if chosen == template.__name__ else "in code"
    try:
        line = inspect.getsourcelines(template)[1]
    except (OSError, TypeError):  # for example, a class that was typed at a prompt
        return "in code"
    return f"{_file(template)}:{line}"


def _file(template: type[Template]) -> str:
    """Return the name of the file that defines a class, or an empty string if there is none."""
    try:
        return Path(inspect.getsourcefile(template) or "").name
    except (OSError, TypeError):
        return ""
