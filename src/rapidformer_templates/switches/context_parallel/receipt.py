"""Measurements that show that sequences are divided."""

from __future__ import annotations

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.switches.context_parallel.sequence_shards import ContextSequenceShards


class ContextDivision(Receipt):
    """Reports ``context_tokens``, ``context_attention`` and ``context_kind``.

    ``context_tokens`` is [tokens of a sequence on this worker, in total]. ``context_attention`` is whether attention
    was divided, and ``context_kind`` is how.
    """

    def after_step(self, engine: Engine) -> dict[str, object]:
        shards = engine.assembly.find(ContextSequenceShards)
        return (
            {}
            if shards is None
            else {
                "context_tokens": shards.shard_sizes,
                "context_attention": shards.attended,
                "context_kind": shards.kind,
            }
        )
