"""The groups of workers that communicate, and whether they do so between nodes. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.plan import Sizes, WorkerGroup


@dataclass(frozen=True)
class Dimension:
    """A way to divide the workers into groups of equal size.

    Attributes:
        name: the name of the dimension.
        exchanges: what the workers of a group send to one another.
        size: number of workers in a group.
        stride: difference between the ranks of neighbors in a group.
    """

    name: str
    exchanges: str
    size: int
    stride: int = 1


def groups_of(sizes: Sizes, more: Sequence[Dimension] = ()) -> tuple[WorkerGroup, ...]:
    """Return the groups with more than one worker that contain rank 0.

    Args:
        more: dimensions of switches, in addition to tensor, context, data and pipeline parallelism.
    """
    neighbours = sizes.tensor * sizes.context
    dimensions = (
        Dimension("tensor", "sums inside a block", sizes.tensor),
        Dimension("context", "attention over a sequence; gradients", sizes.context, sizes.tensor),
        Dimension("data", "gradients, shares of states", sizes.data, neighbours),
        *more,
        Dimension("pipeline", "hidden states of a stage", sizes.pipeline, neighbours * sizes.data),
    )
    groups = []
    for dimension in dimensions:
        size, stride = dimension.size, dimension.stride
        if size > 1:
            firsts = [rank for rank in range(sizes.world) if rank // stride % size == 0]
            nodes = ({(first + i * stride) // sizes.local_world for i in range(size)} for first in firsts)
            groups.append(WorkerGroup(dimension.name, dimension.exchanges, size, stride, nodes=max(map(len, nodes))))
    return tuple(groups)
