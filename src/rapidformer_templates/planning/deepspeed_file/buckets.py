"""The sizes of DeepSpeed's buckets by the width of the model, as in its guide [D]. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapidformer_templates.planning.deepspeed_file.schedules import AUTO

LEAST, MOST = 2**18, 50_000_000
"""Limits of a bucket's elements. With fewer, sending takes longer than computing. With more, it is not faster."""


def by_width(width: int) -> dict[str, int]:
    """Return the elements of each bucket, and the size above which ZeRO-3 partitions a parameter.

    A bucket has the size of a square matrix of this width.

    Args:
        width: the width of the model.
    """
    square = min(max(width * width, LEAST), MOST)
    return {
        "reduce_bucket_size": square,
        "allgather_bucket_size": square + square % 2,  # DeepSpeed requires an even size
        "stage3_prefetch_bucket_size": square * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }


def filled(settings: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return the section ``zero_optimization`` with sizes in place of each ``"auto"``.

    Args:
        width: the width of the model.
    """
    sizes = by_width(width)
    return {name: sizes.get(name, value) if value == AUTO else value for name, value in settings.items()}
