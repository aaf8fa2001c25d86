"""What is trained beside frozen weights."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.trained_parameters import TrainedAndFrozen
from rapidformer_templates.switches.lora.transform import adapted_layers


class TrainedBesideFrozen(TrainedAndFrozen):
    """The same, and how many layers have adapters."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        return super().after_step(engine) | {"adapted_layers": len(list(adapted_layers(engine.model)))}
