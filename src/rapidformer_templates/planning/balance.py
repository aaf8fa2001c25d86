"""Where a model is cut into pipeline stages. Pure: the planner asks it, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Cost = Callable[[int, int, int], float]
"""Of a stage (from 0) with the blocks from the second number up to the third, which it does not have."""


def balanced_cut(
    front: float,
    blocks: Sequence[float],
    back: float,
    stages: int,
    allowed: Callable[[int, int, int], bool] = lambda stage, begin, end: True,
) -> list[int]:
    """The number of consecutive blocks of each stage, so that the most costly stage costs the least.

    Among the cuts that do so, the one whose stages are most alike (least sum of squared costs) is taken, and
    among those one with more blocks in earlier stages.

    Args:
        front: cost of what comes before the blocks (the embedding); the first stage has it.
        blocks: cost of each block, in any unit.
        back: cost of what comes after them (the head); the last stage has it.
        stages: how many; each gets at least one block.
        allowed: whether a stage may have the blocks from one number up to another; there must be a cut that is.

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

    return _least(len(blocks), stages, square, lambda before, own: before + own)[1]


def least_cost(blocks: int, stages: int, cost: Cost) -> float:
    """The least cost that the most costly stage of a cut can have, each stage having at least one block."""
    return _least(blocks, stages, cost, max)[0]


def _least(
    blocks: int,
    stages: int,
    cost: Cost,
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """(least joined cost, blocks of each stage), by dynamic programming over the last cut."""
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
