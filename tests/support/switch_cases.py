"""A run with each switch: its flags, its template and its workers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import nearest
from rapidformer_templates.planning.switch import Switch

Case = tuple[str, int, str, Mapping[str, Any]]
"""(name, workers, template, values)."""

CHEAP = {
    "torch_compile": "aot_eager",
    "deepspeed_config": '{"zero_optimization": {"stage": 2}}',
    "nvme_path": "{folder}",
}
"""Values that mean the same for the states and need neither time nor a user's file."""


def case_of(switch: Switch) -> Case:
    """Return the switch with what it needs, as the nearest combination that the rules accept."""
    template = "Trainer" if "Trainer" in switch.templates else switch.templates[0]
    world = 4 if switch.name == "hybrid-sharding" else 2  # two groups of two
    place = detect(template, "test", device="cpu", world_size=world)
    packages = {**place.packages, **({switch.needs_package: "any"} if switch.needs_package else {})}
    place = dataclasses.replace(place, packages=packages)
    values = {name: CHEAP.get(name, value) for name, value in switch.on.items()}
    config = REGISTRY.complete(RunConfig()).replace("test", micro_batch_size=2, **values)
    request = build_request(config, place, REGISTRY.switches)
    if REGISTRY.refusals(request):
        kept = (
            path for path in nearest(request, REGISTRY) if all(name not in c.values for c in path for name in values)
        )
        values |= {name: value for change in next(kept) for name, value in change.values.items()}
    return switch.name, world, template, values


def words(values: Mapping[str, Any], folder: str) -> list[str]:
    """Return the words of a command that trains one step on CPUs and saves to a folder."""
    found = [
        "--device", "cpu", "--lr", "1e-3", "--train-iters", "1", "--micro-batch-size", "2", "--save", folder,
        "--no-export-model",
    ]  # fmt: skip
    for name, value in values.items():
        off = spelling(name).replace("--", "--no-", 1)
        if isinstance(value, bool):
            found += [spelling(name) if value else off]
        else:
            found += [spelling(name), str(value).replace("{folder}", folder)]
    return found
