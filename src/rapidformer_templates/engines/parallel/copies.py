"""Which workers hold copies of a parameter: all data-parallel workers, or for sharded experts those with the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rapidformer_templates.system.workers import Workers

COPIES = "copies"
"""The mesh dimension along which a tensor is replicated."""


@dataclass(frozen=True)
class Copies:
    """The workers that hold the same part of a parameter, from the view of one of them.

    The copies of an expert are a subset of the copies of other parameters. The size distinguishes the sets of a worker.

    Attributes:
        size: number of workers.
        rank: index of this worker among them.
        group: their process group. None is the group of all workers.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)


NO_COPIES = Copies()
"""For tensors that only one worker has."""


def copies_of(tensor: torch.Tensor, workers: Workers) -> Copies:
    """Return the workers with the same values as this one, from the tensor's mesh or else the workers' mesh."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if mesh is None or COPIES not in (mesh.mesh_dim_names or ()):
        mesh = workers.mesh
    if mesh is None:
        return Copies(workers.copies, workers.copy_rank)
    group = mesh.get_group(COPIES)
    return Copies(group.size(), group.rank(), group)
