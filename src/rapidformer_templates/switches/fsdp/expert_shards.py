"""How FSDP shards experts, of which each worker of a group has others already. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shards_of_experts(workers: int, size: int, over: int) -> int:
    """Workers that an expert is divided over.

    Args:
        workers: all of them.
        size: of a group that shares everything else.
        over: workers that the experts are divided over, each of which has others.
    """
    return math.gcd(workers // over, max(1, size // over))


def widthwise(shape: Sequence[int], workers: int) -> int:
    """The dimension along which a stack of experts is divided: each has a part of every expert's matrices.

    Where no width divides, whole experts go to the workers.
    """
    return next((dim for dim in range(1, len(shape)) if shape[dim] % workers == 0), 0)
