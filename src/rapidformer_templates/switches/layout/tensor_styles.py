"""The styles of layers under tensor parallelism, and the architectures that have a plan. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

EMBEDDING, VOCABULARY_HEAD = "embedding_rowwise", "vocabulary_head"
"""Each worker has the rows of some tokens. The head's logits stay divided."""
COLUMN = frozenset({"colwise", "fused_qkv", "packed_colwise", "embedding_colwise"})
"""Styles with a divided output that goes into a row-parallel layer of the same region."""
ROW = frozenset({"rowwise"})
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
"""Layers with whole inputs and outputs. Everything between them runs whole on each worker."""
PARTIAL = "replicated_with_grad_allreduce"
"""Whole parameters inside a region. Each worker has a part of their gradient."""
EXPERTS = "moe_tp_experts"
EXPERTS_COLUMN, EXPERTS_ROW = "experts_colwise", "experts_rowwise"
"""Parameters of experts that are stored as (experts, input features, output features)."""
REPLICATED = "replicate"
"""Whole parameters of adapters with whole gradients, before the columns or after the rows of divided layers."""

PARTS = {"fused_qkv": 3, "packed_colwise": 2}
"""Number of equal matrices that are packed into one. Each is divided separately."""

KNOWN = (
    COLUMN | ROW | {EMBEDDING, GATHERED_COLUMN, SPLIT_ROW, PARTIAL, EXPERTS, EXPERTS_COLUMN, EXPERTS_ROW, REPLICATED}
)

_BERT = {
    "layer.*.attention.self.query": "colwise",
    "layer.*.attention.self.key": "colwise",
    "layer.*.attention.self.value": "colwise",
    "layer.*.attention.output.dense": "rowwise",
    "layer.*.crossattention.self.query": "colwise",
    "layer.*.crossattention.self.key": "colwise",
    "layer.*.crossattention.self.value": "colwise",
    "layer.*.crossattention.output.dense": "rowwise",
    "layer.*.intermediate.dense": "colwise",
    "layer.*.output.dense": "rowwise",
}
_T5 = {
    **{
        f"block.*.layer.*.{attention}.{name}": style
        for attention in ("SelfAttention", "EncDecAttention")
        for name, style in {
            "q": "colwise",
            "k": "colwise",
            "v": "colwise",
            "o": "rowwise",
            "relative_attention_bias": "embedding_colwise",
        }.items()
    },
    "block.*.layer.*.DenseReluDense.wi": "colwise",
    "block.*.layer.*.DenseReluDense.wi_0": "colwise",
    "block.*.layer.*.DenseReluDense.wi_1": "colwise",
    "block.*.layer.*.DenseReluDense.wo": "rowwise",
}
PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_attn": "packed_colwise",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "t5": _T5,
    "mt5": _T5,
    "vit": {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
}
"""Plans for architectures that have none in transformers. ``*`` is a number."""

LOCAL_SIZES = {"gpt2": ("split_size",), "t5": ("n_heads",), "mt5": ("n_heads",)}
"""Attributes in which the attention of those architectures stores a size that is divided."""


@cache
def styles_in_transformers(model_type: str) -> frozenset[str] | None:
    """Return the styles in transformers' plan for an architecture, read from its source.

    Importing transformers would import torch, which takes longer than making the whole plan.

    Returns:
        An empty set if it has no plan. None if the source of the architecture is not found.
    """
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    name = model_type.replace("-", "_")
    file = Path(folders[0], "models", name, f"configuration_{name}.py") if folders else None
    if file is None or not file.is_file():
        return None
    plans = re.findall(r"base_model_tp_plan\s*=\s*\{(.*?)\}", file.read_text(encoding="utf-8"), re.DOTALL)
    return frozenset(re.findall(r'"[^"]+":\s*"([^"]+)"', "".join(plans)))
