"""Who holds copies of a parameter: every data-parallel worker, or, of divided experts, those that have the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rapidformer_templates.system.workers import Workers

COPIES = "copies"
"""The dimension of a mesh along which a tensor is the same."""


@dataclass(frozen=True)
class Copies:
    """The workers that hold the same part of a parameter, as one of them sees them.

    Those of an expert are some of those of everything else: their number tells the sets of a worker apart.

    Attributes:
        size: how many they are.
        rank: this worker's place among them.
        group: their process group; None is that of all workers.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)


NONE = Copies()
"""Of what a worker alone has."""


def copies_of(tensor: torch.Tensor, workers: Workers) -> Copies:
    """Who holds the same as this worker: what the tensor's own mesh says, or else the workers'."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if mesh is None or COPIES not in (mesh.mesh_dim_names or ()):
        mesh = workers.mesh
    if mesh is None:
        return Copies(workers.copies, workers.copy_rank)
    group = mesh.get_group(COPIES)
    return Copies(group.size(), group.rank(), group)
