"""Measurements that show that a model is divided."""

from __future__ import annotations

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.switches.tensor_parallel.transform import TensorParallel


class TensorDivision(Receipt):
    """Reports ``tensor_parallel_size``, ``logits_columns`` and ``sequence_tokens``.

    The last two are [on this worker, in total] in the latest forward. They are None if this worker has no head or does
    not divide sequences.
    """

    def after_step(self, engine: Engine) -> dict[str, object]:
        applied = engine.assembly.find(TensorParallel)
        if applied is None:
            return {}
        head, shards = applied.head, applied.shards
        return {
            "tensor_parallel_size": applied.peers.size,
            "logits_columns": head and head.columns,
            "sequence_tokens": shards and shards.shard_sizes,
        }
