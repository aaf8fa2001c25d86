"""What shows that groups of workers have copies of one and the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element has."""


class Copies(Receipt):
    """``copies`` of the trained parameters that the workers hold, and whether they are equal, bit for bit."""

    def after_step(self, engine: Engine) -> dict[str, Any]:
        trained = [p for group in engine.optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        if not trained:
            return {}
        sums = engine.workers.gather([_sum_of_bits(parameter.to_local()) for parameter in trained])
        ranks = trained[0].device_mesh.mesh.reshape(-1, trained[0].device_mesh.shape[-1]).tolist()
        equal = all(sums[rank] == sums[first] for copy in ranks[1:] for rank, first in zip(copy, ranks[0], strict=True))
        return {"copies": len(ranks), "copies_equal": equal}


def _sum_of_bits(values: torch.Tensor) -> int:
    """A number that another last bit of one element would change."""
    return int(values.detach().view(WORDS[values.element_size()]).sum(dtype=torch.int64))
