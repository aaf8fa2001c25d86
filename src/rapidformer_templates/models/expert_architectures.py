"""Facts about architectures that need no torch."""

from __future__ import annotations

OWN_EXPERTS = frozenset(
    {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "flex_olmo"}
)  # fmt: skip
"""Architectures of transformers whose own experts are used without conversion."""

CONVERTED = "moe-"
"""Prefix of ``model_type`` for exported models whose dense feed-forward layers were converted to mixtures."""
