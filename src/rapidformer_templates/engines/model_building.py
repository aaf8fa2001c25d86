"""The inputs of a model transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.workers import Workers


@dataclass(frozen=True)
class Building:
    """Context of a model between ``build_model`` and the engine, for its transforms.

    Attributes:
        blocks: the blocks of the model by name, as it was built.
        options: the flags of the switch that the transform belongs to.
        plan: the plan of the run.
        workers: this process and its peers.
        try_loss: computes the user's loss of one sample with a given model, so that a transform can observe the model.
        has_values: False if only shapes are planned and the tensors of the model have no data.
    """

    blocks: Mapping[str, nn.Module]
    options: Any
    plan: Plan
    workers: Workers
    try_loss: Callable[[nn.Module], Any]
    has_values: bool = True
