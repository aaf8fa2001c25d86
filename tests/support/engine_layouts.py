"""One layout of each engine of the registry, and some that divide a model over two workers."""

from __future__ import annotations

from rapidformer_templates.planning.registry import REGISTRY

LAYOUTS = {
    "replicas": (),
    "context 2": ("context-parallel",),
    "hybrid sharding": ("hybrid-sharding",),
    "tensor 2, pipeline 2": ("tensor-parallel", "pipeline-parallel"),
    "tensor 2, zero-2": ("tensor-parallel", "zero-2"),
    "tensor 2, divided experts": ("tensor-parallel", "expert-parallel"),
}
"""Layouts in addition to one run of each switch that has an engine. Some of these divide a model over two workers."""

NAMES: dict[str, tuple[str, ...]] = {
    **LAYOUTS,
    **{switch.name: (switch.name,) for switch in REGISTRY.switches if switch.engine},
}
"""The switches of each layout."""
