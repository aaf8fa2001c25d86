"""Which part of the whole model a worker has, in the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_ATTRIBUTE = "_pipeline_placement"


@dataclass(frozen=True)
class Placement:
    """What a pipeline stage has; an uncut model has everything under its own names.

    Attributes:
        names: canonical names in the whole model of those tensors that have another one here. A tied
            parameter is saved under its first name, which may belong to a module of another stage.
        stages: pipeline ranks that hold a copy, of each tensor that more than one holds, by whole-model name.
        chunks: the local part of the pipeline (from 0) whose backward gives a parameter its gradient, by
            whole-model name; parameters that are not listed may get one from any.
        parts: the local blocks by name, for each local part; None for an uncut model.
        blocks_in_all: of the whole model.
        form: entries of the tuple that a block returns; None if it returns a tensor.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Mapping[str, nn.Module], ...] | None = None
    blocks_in_all: int = 0
    form: int | None = None

    def whole_name(self, name: str) -> str:
        """The canonical name in the whole model."""
        return self.names.get(name, name)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """All local blocks of a cut model, by name."""
        return {name: block for part in self.parts or () for name, block in part.items()}


def placement_of(model: nn.Module) -> Placement:
    """What is known of a model that was cut; of another one, that it is whole."""
    placement: Placement | None = getattr(model, _ATTRIBUTE, None)
    return placement or Placement()


def set_placement(model: nn.Module, placement: Placement) -> None:
    """Note on a model what it is a part of."""
    setattr(model, _ATTRIBUTE, placement)


def whole(*parameters: Any) -> AbstractContextManager[Any]:
    """Parameters that ZeRO-3 may have divided, whole and to be read; every worker must enter."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    gathered: AbstractContextManager[Any] = GatheredParameters(list(parameters))
    return gathered
