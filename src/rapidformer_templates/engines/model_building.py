"""What a transform of the model may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.workers import Workers


@dataclass(frozen=True)
class Building:
    """A model on its way from ``build_model`` to the engine.

    Attributes:
        blocks: the blocks of the model by name, as it was built.
        options: the flags of the switch that the transform belongs to.
        plan: what the run will do.
        workers: this process among its peers.
        try_loss: the user's loss of one sample, with the given model: how a transform can see what the model does.
        has_values: False where the shapes of the model are planned, and its tensors have no data.
    """

    blocks: Mapping[str, nn.Module]
    options: Any
    plan: Plan
    workers: Workers
    try_loss: Callable[[nn.Module], Any]
    has_values: bool = True
