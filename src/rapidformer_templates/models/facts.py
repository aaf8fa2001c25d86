"""What is known of architectures without torch."""

from __future__ import annotations

OWN_EXPERTS = frozenset(
    {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "flex_olmo"}
)  # fmt: skip
"""Architectures of transformers whose experts are taken in as they are."""

CONVERTED = "moe-"
"""Begins the ``model_type`` of an exported model whose dense feed-forwards have become mixtures."""
