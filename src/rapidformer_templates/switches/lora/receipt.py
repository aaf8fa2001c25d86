"""What is trained beside frozen weights."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.trained_parameters import TrainedAndFrozen
from rapidformer_templates.switches.lora.matrices import MatrixAdapter
from rapidformer_templates.switches.lora.quantized import lies_in_codes
from rapidformer_templates.switches.lora.transform import adapted_layers


class TrainedBesideFrozen(TrainedAndFrozen):
    """The same, how many layers and stacks have adapters, and how many of these have their weights in codes."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        layers = [layer for _, layer in adapted_layers(engine.model)]
        return super().after_step(engine) | {
            "adapted_layers": len(layers),
            "adapted_routers": sum(isinstance(layer, MatrixAdapter) for layer in layers),
            "quantized_layers": sum(map(lies_in_codes, layers)),
        }
