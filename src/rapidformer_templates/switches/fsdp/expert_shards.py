"""How FSDP shards experts that expert parallelism has already divided. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shards_of_experts(workers: int, size: int, over: int) -> int:
    """Return the number of workers that an expert is sharded over.

    Args:
        workers: number of all workers.
        size: number of workers in a group that shares everything else.
        over: number of workers that the experts are divided over. Each of them has different experts.
    """
    return math.gcd(workers // over, max(1, size // over))


def widthwise(shape: Sequence[int], workers: int) -> int:
    """Return the dimension along which a stack of experts is sharded, so that each worker has a part of every expert.

    If no width is divisible, each worker gets whole experts.
    """
    return next((dim for dim in range(1, len(shape)) if shape[dim] % workers == 0), 0)
