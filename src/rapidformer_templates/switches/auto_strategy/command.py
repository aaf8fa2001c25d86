"""``rapidformer plan --auto-strategy``, and the layout that a training command uses."""

from __future__ import annotations

import os
import sys
from typing import Any

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.hardware import Hardware, find_hardware
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.search import Search, SearchResult
from rapidformer_templates.switches.auto_strategy.show import not_predicted, print_json, reasons, show
from rapidformer_templates.switches.pipeline_parallel.declaration import AUTO_MEMORY


class NothingFits(RapidformerError):
    """No layout of the workers fits the model."""


def search(config: RunConfig, environment: Environment, registry: Registry = REGISTRY) -> tuple[SearchResult, Hardware]:
    """Search all layouts. Return them, and the devices that they are for.

    Raises:
        Refused: a rule is broken that no layout can satisfy.
        ModelError: the model cannot be built.
        ConfigError: the memory of the devices is unknown.
    """
    by_memory = _balances_memory(config)
    if by_memory:  # every layout with a pipeline requests it, and no other layout may
        config = config.replace("default", pipeline_stages=None)
    plan = _without_a_layout(config, environment, registry)
    hardware = find_hardware(environment, precision(registry.complete(config), environment))
    subject = Subject(config, plan, gpu=environment.device != "cpu")
    return Search(config, environment, subject, hardware, registry, by_memory=by_memory).run(), hardware


def _balances_memory(config: RunConfig) -> bool:
    return bool(config.get("pipeline_stages") == AUTO_MEMORY)


def _without_a_layout(config: RunConfig, environment: Environment, registry: Registry) -> Plan:
    """Return the plan of the flags without a layout. Invalid flags are refused with the usual message."""
    open_sizes = {"micro_batch_size": 1, "global_batch_size": None}
    return resolve(registry.complete(config).replace("default", **open_sizes), environment, registry)


def best_layout(config: RunConfig, environment: Environment) -> dict[str, Any]:
    """Return the best layout's fields that the user has left open. They are shown first.

    Raises:
        NothingFits: no layout fits.
        Refused, ModelError, ConfigError: see :func:`search`.
    """
    result, hardware = search(config, environment)
    if not result.layouts:
        raise NothingFits(
            f"no layout of {environment.world_size} workers with {hardware.memory_gb:g} GB each fits this model",
            where=f"--auto-strategy: {result.rejected[-1].constraint}" if result.rejected else "--auto-strategy",
            hint="rapidformer plan --auto-strategy … lists every layout with what it lacks",
        )
    if os.environ.get("RANK", "0") == "0":
        print("\n".join([*reasons(result, hardware), *not_predicted(result)]), file=sys.stderr, flush=True)
    user_fields = config.origins.keys() - ({"pipeline_stages"} if _balances_memory(config) else set())
    values = result.layouts[0].layout.values_that_act(user_fields)
    return values if "pipeline_stages" in user_fields else {"pipeline_stages": None, **values}


def plan_command(config: RunConfig, environment: Environment, *, as_json: bool) -> int:
    """Search and print. Return the exit status, which is 1 if nothing fits."""
    result, hardware = search(config, environment)
    if as_json:
        print_json(result, hardware)
    else:
        show(result, hardware)
    return 0 if result.layouts else 1
