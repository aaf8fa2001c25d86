"""What of a model is trained, and what is left as it is."""

from __future__ import annotations

import math
from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.models.blocks import bytes_of, shape_of


class TrainedAndFrozen(Receipt):
    """Elements and bytes of the whole parameters that are trained and of those that are not."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        values = {}
        for kind, is_trained in (("trained", True), ("frozen", False)):
            mine = [p for p in engine.model.parameters() if p.requires_grad == is_trained]
            values[f"{kind}_parameters"] = sum(math.prod(shape_of(p)) for p in mine)
            values[f"{kind}_bytes"] = sum(map(bytes_of, mine))
        return values
