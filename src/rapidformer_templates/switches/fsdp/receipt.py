"""Measurements that show that groups of workers have copies of the same parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the number of bytes of an element."""


class ShardCopies(Receipt):
    """Reports the number of copies of the trained parameters, and whether they are equal bit for bit."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        trained = [p for group in engine.optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        if not trained:
            return {}
        sums = engine.workers.gather([_sum_of_bits(parameter.to_local()) for parameter in trained])
        copies = [_copies_of(parameter) for parameter in trained]
        equal = all(
            len({sums[rank][index] for rank in same}) == 1 for index, parts in enumerate(copies) for same in parts
        )
        return {"copies": max(len(same) for parts in copies for same in parts), "copies_equal": equal}


def _copies_of(parameter: DTensor) -> list[list[int]]:
    """Return the ranks that have each part of a parameter."""
    mesh, placements = parameter.device_mesh.mesh, parameter.placements
    dividing = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    together = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    count = math.prod(mesh.shape[dim] for dim in dividing)
    parts: list[list[int]] = mesh.permute(*dividing, *together).reshape(count, -1).tolist()
    return parts


def _sum_of_bits(values: torch.Tensor) -> int:
    """Return a checksum that changes if the last bit of any element changes."""
    return int(values.detach().view(WORDS[values.element_size()]).sum(dtype=torch.int64))
