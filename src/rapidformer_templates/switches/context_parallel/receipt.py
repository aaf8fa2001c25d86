"""What shows that sequences are divided."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.switches.context_parallel.stretches import ContextShards


class Stretches(Receipt):
    """``context_tokens``: [of a sequence on this worker, in all]; ``context_attention``: whether it was divided;
    ``context_kind``: how.
    """

    def after_step(self, engine: Engine) -> dict[str, Any]:
        shards: ContextShards | None = getattr(engine.model, "context_shards", None)
        return (
            {}
            if shards is None
            else {"context_tokens": shards.held, "context_attention": shards.attended, "context_kind": shards.kind}
        )
