"""What is trained beside frozen weights."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.trained_parameters import TrainedAndFrozen
from rapidformer_templates.switches.lora.quantized import QuantizedLinear
from rapidformer_templates.switches.lora.transform import adapted_layers


class TrainedBesideFrozen(TrainedAndFrozen):
    """The same, how many layers have adapters, and how many of these have their weights in codes."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        layers = [layer for _, layer in adapted_layers(engine.model)]
        in_codes = sum(isinstance(layer.get_base_layer(), QuantizedLinear) for layer in layers)
        return super().after_step(engine) | {"adapted_layers": len(layers), "quantized_layers": in_codes}
