"""Measures which parameters of a model are trained and which are frozen."""

from __future__ import annotations

import math
from typing import TypeVar

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.models.blocks import bytes_of, canonical_name, shape_of

T = TypeVar("T")


class TrainedAndFrozen(Receipt):
    """Elements and bytes of the trained and of the frozen parameters, in full size and over all pipeline stages."""

    def after_step(self, engine: Engine) -> dict[str, int]:
        whole_name = engine.assembly.placement.whole_name
        local = {
            whole_name(canonical_name(name)): (p.requires_grad, math.prod(shape_of(p)), bytes_of(p))
            for name, p in engine.model.named_parameters()
        }
        parameters = merge_by_name(engine, local).values()
        return {
            "trained_parameters": sum(count for trained, count, _ in parameters if trained),
            "trained_bytes": sum(size for trained, _, size in parameters if trained),
            "frozen_parameters": sum(count for trained, count, _ in parameters if not trained),
            "frozen_bytes": sum(size for trained, _, size in parameters if not trained),
        }


def merge_by_name(engine: Engine, local: dict[str, T]) -> dict[str, T]:
    """Merge the reports of all workers, by name in the whole model. The first worker that has a part counts."""
    merged: dict[str, T] = {}
    for of_worker in reversed(engine.workers.gather(local)):
        merged |= of_worker
    return merged
