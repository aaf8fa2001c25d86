"""Measurements of what is trained and what is frozen in a model with adapters."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.trained_parameters import TrainedAndFrozen, merge_by_name
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.switches.lora.matrices import MatrixAdapter
from rapidformer_templates.switches.lora.quantized import is_quantized
from rapidformer_templates.switches.lora.transform import adapted_layers


class TrainedBesideFrozen(TrainedAndFrozen):
    """Adds the number of adapted layers and stacks, and how many of them have quantized weights."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        local = {
            canonical_name(name): (isinstance(layer, MatrixAdapter), is_quantized(layer))
            for name, layer in adapted_layers(engine.model)
        }
        layers = merge_by_name(engine, local).values()
        return super().after_step(engine) | {
            "adapted_layers": len(layers),
            "adapted_routers": sum(is_router for is_router, _ in layers),
            "quantized_layers": sum(is_coded for _, is_coded in layers),
        }
