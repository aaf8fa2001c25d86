"""Which part of the whole model a worker has, in terms of the whole model's names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Placement:
    """The parts of a pipeline stage. An undivided model has all of them under their own names.

    Attributes:
        names: whole-model canonical names of tensors that have another name here. A tied parameter is saved under its
            first name, which may belong to a module of another stage.
        stages: for tensors with several copies, the pipeline ranks that have one, by whole-model name.
        chunks: the local part of the pipeline (from 0) whose backward gives a parameter its gradient, by whole-model
            name. Parameters that are not listed may get one from any part.
        parts: the local blocks by name, for each local part. None for an undivided model.
        blocks_in_all: number of blocks in the whole model.
        form: number of entries in the tuple that a block returns. None if it returns a tensor.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Mapping[str, nn.Module], ...] | None = None
    blocks_in_all: int = 0
    form: int | None = None

    def whole_name(self, name: str) -> str:
        """Return the canonical name in the whole model."""
        return self.names.get(name, name)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """All local blocks of a pipeline stage, by name."""
        return {name: block for part in self.parts or () for name, block in part.items()}


def whole(*parameters: Any) -> AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 may have partitioned, for reading. Every worker must enter the context."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    gathered: AbstractContextManager[Any] = GatheredParameters(list(parameters))
    return gathered
