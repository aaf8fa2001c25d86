"""How large DeepSpeed's buckets are, by the width of the model, as its guide [D] has them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapidformer_templates.planning.deepspeed_file.schedules import AUTO

LEAST, MOST = 2**18, 50_000_000
"""Elements between which a bucket stays: of less, sending takes longer than computing; of more, it is no faster."""


def by_width(width: int) -> dict[str, int]:
    """Elements of each bucket, and from which on ZeRO-3 divides a parameter; in a square block a bucket is a matrix.

    Args:
        width: of the model.
    """
    square = min(max(width * width, LEAST), MOST)
    return {
        "reduce_bucket_size": square,
        "allgather_bucket_size": square + square % 2,  # DeepSpeed wants an even one
        "stage3_prefetch_bucket_size": square * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }


def filled(settings: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The section ``zero_optimization`` with sizes in place of each ``"auto"``.

    Args:
        width: of the model.
    """
    sizes = by_width(width)
    return {name: sizes.get(name, value) if value == AUTO else value for name, value in settings.items()}
