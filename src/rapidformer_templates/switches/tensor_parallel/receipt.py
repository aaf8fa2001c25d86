"""What shows that a model is divided."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.switches.tensor_parallel.transform import TensorParallel


class Division(Receipt):
    """``tensor_parallel_size``; ``logits_columns`` and ``sequence_tokens``: [held on this worker, in all].

    Both are of the latest forward, and None where this worker has no head or divides no sequence.
    """

    def after_step(self, engine: Engine) -> dict[str, Any]:
        applied: TensorParallel | None = getattr(engine.model, "tensor_parallel", None)
        if applied is None:
            return {}
        head, shards = applied.head, applied.shards
        return {
            "tensor_parallel_size": applied.peers.size,
            "logits_columns": head and head.columns,
            "sequence_tokens": shards and shards.held,
        }
