"""Where a model is cut into pipeline stages. These functions are pure, because the planner uses them, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Cost = Callable[[int, int, int], float]
"""Returns the cost of a stage, from its index, the index of its first block and the index after its last block."""


def balanced_cut(
    front: float,
    blocks: Sequence[float],
    back: float,
    stages: int,
    allowed: Callable[[int, int, int], bool] = lambda stage, begin, end: True,
) -> list[int]:
    """Return the number of consecutive blocks of each stage, so that the highest cost of a stage is minimal.

    If several cuts have this cost, choose the one whose stages are most equal (lowest sum of squared costs). If there
    are still several, choose one with more blocks in earlier stages.

    Args:
        front: cost of everything before the blocks (the embedding), which is on the first stage.
        blocks: cost of each block, in any unit.
        back: cost of everything after the blocks (the head), which is on the last stage.
        stages: number of stages. Each gets at least one block.
        allowed: whether a stage may have the blocks from one index up to another. At least one cut must be allowed.

    Raises:
        ValueError: there are fewer blocks than stages.

    >>> balanced_cut(2.0, [1.0] * 8, 2.0, 4)
    [1, 3, 3, 1]
    """
    if not 0 < stages <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks cannot be cut into {stages} stages")
    sums = [0.0, *itertools.accumulate(blocks)]

    def cost(stage: int, begin: int, end: int) -> float:
        if not allowed(stage, begin, end):
            return math.inf
        ends = (front if stage == 0 else 0.0) + (back if stage == stages - 1 else 0.0)
        return sums[end] - sums[begin] + ends

    limit = _least(len(blocks), stages, cost, max)[0] * (1 + 1e-9)

    def square(stage: int, begin: int, end: int) -> float:
        costs = cost(stage, begin, end)
        return costs**2 if costs <= limit else math.inf

    return _least(len(blocks), stages, square, lambda before, cost_of_last: before + cost_of_last)[1]


def least_cost(blocks: int, stages: int, cost: Cost) -> float:
    """Minimize the highest cost of a stage over all cuts, and return it. Each stage has at least one block."""
    return _least(blocks, stages, cost, max)[0]


def _least(blocks: int, stages: int, cost: Cost, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return (lowest combined cost, blocks of each stage), with dynamic programming over the last cut."""
    nothing: tuple[float, list[int]] = (math.inf, [])
    best: list[tuple[float, list[int]]] = [(0.0, []), *[nothing] * blocks]
    for stage in range(stages):
        following = [nothing] * (blocks + 1)
        for end in range(stage + 1, blocks - (stages - stage - 1) + 1):
            for begin in range(end - 1, stage - 1, -1):
                joined = join(best[begin][0], cost(stage, begin, end))
                if joined < following[end][0] or not following[end][1]:
                    following[end] = (joined, [*best[begin][1], end - begin])
        best = following
    return best[blocks]
