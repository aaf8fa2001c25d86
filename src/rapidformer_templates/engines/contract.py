"""The names of an engine that the training loop uses, and the receipts of switches.

A receipt has measurements with which a switch shows that it acted. The ``receipt_hooks`` of a switch name a class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.engines.step import ComputeLoss as ComputeLoss
from rapidformer_templates.engines.step import StepResult as StepResult
from rapidformer_templates.models.blocks import bytes_of, canonical_name, shape_of

Engine = SingleEngine
"""Trains a model. The engine of one process is the base of all others, with the methods that they share."""

T = TypeVar("T")


@dataclass(frozen=True)
class Probe:
    """A run before its first step.

    Attributes:
        engine: the engine that trains.
        microbatch: the first micro batch of this worker.
    """

    engine: Engine
    microbatch: MicroBatch

    def forward(self) -> None:
        """Compute the loss of the micro batch, in a forward without side effects."""
        batch = to_device(self.microbatch.batch, self.engine.workers.device)
        with self.engine.measuring() as model:
            self.engine.compute_loss(model, batch)


class Receipt:
    """Measurements of one switch. Each method does nothing by default.

    Values are plain and have the names in the switch's ``receipt``. A worker without a value omits it or returns None.
    The switch's ``acted`` checks them, and ``summary.json`` shows them.

    Attributes:
        compiles: whether modules are compiled to graphs, which would include hooks on them.
    """

    compiles = False

    def before_step(self, probe: Probe) -> Mapping[str, object]:
        """Measure forwards before the first step. Workers that share a model's weights must run the same ones."""
        return {}

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Context for the first step."""
        yield

    def after_step(self, engine: Engine) -> Mapping[str, object]:
        """Measure the engine after the first step, and again at the end of the run."""
        return {}

    def hides_parts(self, module: nn.Module) -> bool:
        """Whether a module runs as a graph, so that its submodules are not called."""
        return False


def storage_elements(tensors: Sequence[torch.Tensor]) -> int:
    """Count the elements in the storages of these tensors on this rank. A shared storage counts once."""
    storages = {part.untyped_storage().data_ptr(): part for part in map(local_part, tensors)}
    return sum(part.untyped_storage().nbytes() // part.element_size() for part in storages.values())


def bytes_by_kind(tensors_by_kind: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int]:
    """Return bytes of the storages on this rank, by kind. A shared storage counts once, for its first kind."""
    storages: set[int] = set()
    sizes = dict.fromkeys(tensors_by_kind, 0)
    for kind, tensors in tensors_by_kind.items():
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            if storage.nbytes() and storage._cdata not in storages:
                storages.add(storage._cdata)
                sizes[kind] += storage.nbytes()
    return sizes


WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes per element."""


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the local values that changes if the last bit of any element changes.

    The bits are summed in place, read as integers. A copy would double the memory.
    """
    local = local_part(tensor).detach()
    return local.view(WHOLE_NUMBERS[local.element_size()]).sum(dtype=torch.int64)


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
