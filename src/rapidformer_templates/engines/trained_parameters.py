"""What of a model is trained, and what is left as it is."""

from __future__ import annotations

import math
from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.models.blocks import shape_of


class TrainedAndFrozen(Receipt):
    """Elements and bytes of the whole parameters that are trained and of those that are not."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        parameters = [(p, math.prod(shape_of(p))) for p in engine.model.parameters()]
        values = {}
        for kind, is_trained in (("trained", True), ("frozen", False)):
            mine = [(p, count) for p, count in parameters if p.requires_grad == is_trained]
            values[f"{kind}_parameters"] = sum(count for _, count in mine)
            values[f"{kind}_bytes"] = sum(count * p.element_size() for p, count in mine)
        return values
