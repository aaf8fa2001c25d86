"""One layout of each engine of the registry, and some that divide a model over two workers."""

from functools import cache

from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from tests.support.combinations import parsed, place, smallest

LAYOUTS = {
    "replicas": (),
    "context 2": ("context-parallel",),
    "hybrid sharding": ("hybrid-sharding",),
    "tensor 2, pipeline 2": ("tensor-parallel", "pipeline-parallel"),
    "tensor 2, zero-2": ("tensor-parallel", "zero-2"),
    "tensor 2, shards": ("tensor-parallel", "sharding-strategy"),
    "pipeline 2, shards": ("pipeline-parallel", "sharding-strategy"),
    "tensor 2, divided experts": ("tensor-parallel", "expert-parallel"),
}
"""Layouts in addition to one run of each switch that has an engine. Some of these divide a model over two workers."""

NAMES: dict[str, tuple[str, ...]] = {
    **LAYOUTS,
    **{switch.name: (switch.name,) for switch in REGISTRY.switches if switch.engine},
}
"""The switches of each layout."""


@cache
def runs_of_layouts() -> tuple[dict[str, str], dict[str, int]]:
    """Return the flags of each layout that the rules accept, and the number of workers, which is as small as it can be.

    A layout more is a pipeline whose workers have two stages each.
    """
    combinations = {name: found for name, names in NAMES.items() if (found := smallest(names))}
    flags = {name: " ".join(found.flags) for name, found in combinations.items()}
    flags["interleaved"] = f"{flags['pipeline-parallel']} --virtual-pipeline-size 2"
    return flags, {name: found.world for name, found in combinations.items()} | {"interleaved": 2}


def accepts(layout: str, words: str) -> bool:
    """Return whether the rules accept the layout with these flags, in a run of the Trainer."""
    flags, worlds = runs_of_layouts()
    return accepts_on(worlds[layout], f"{flags[layout]} {words}".split())


def accepts_on(workers: int, words: list[str]) -> bool:
    """Return whether the rules accept these flags in a run of the Trainer on this number of workers."""
    config = REGISTRY.complete(parsed((*words, "--save", "run")))
    return not REGISTRY.refusals(build_request(config, place(workers, "Trainer"), REGISTRY.switches, training=True))
