"""A model between ``build_model`` and the end of a run, with the facts that switches and engines share about it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import ReferenceType

import torch
from torch import nn

from rapidformer_templates.engines.backwards import UNLIMITED, Derivatives
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.loss import AuxiliaryLosses, LossLayer
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import FrozenBase
from rapidformer_templates.models.blocks import Placement, find_blocks
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.workers import Workers

F = TypeVar("F")
O_co = TypeVar("O_co", covariant=True)


@dataclass
class Assembly:
    """A model with the facts that the transforms, the engine and the receipts of a run share about it.

    A switch may record one fact of each class that it defines.

    Attributes:
        model: the model. A transform may replace it.
        losses: the auxiliary losses. A model that was built with layers that have them begins with these.
        base: the frozen weights, if checkpoints have only the adapters.
        settings: values by flag that decide what the weights compute, but not their shapes. A checkpoint's weights are
            only right with the same values.
        placement: which part of the whole model this worker has.
        is_compiled: whether its blocks run as compiled graphs.
        built: the parameters as they were built, if anything still refers to them.
        derivatives_in_loss: the derivatives through the model that a loss may take. The strictest limit counts.
    """

    model: nn.Module
    losses: AuxiliaryLosses | None = field(init=False)
    base: FrozenBase | None = None
    settings: dict[str, object] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    is_compiled: bool = False
    derivatives_in_loss: Derivatives = UNLIMITED
    built: Sequence[ReferenceType[nn.Parameter]] = field(init=False, repr=False)
    _facts: dict[type, object] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        layers = (module for module in self.model.modules() if isinstance(module, LossLayer))
        self.built = [weakref.ref(parameter) for parameter in self.model.parameters()]
        self.losses = next((layer.losses for layer in layers), None)

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """The repeated blocks on this worker by name, in order."""
        return find_blocks(self.model) if self.placement.parts is None else self.placement.blocks

    def require_blocks(self, user: str, flag: str) -> Mapping[str, nn.Module]:
        """Return the blocks for a user of them, such as activation checkpointing.

        Raises:
            ModelError: there are none.
        """
        if not self.blocks:
            raise ModelError(
                f"{user} found no repeated blocks",
                where=type(self.model).__name__,
                hint=f"keep the blocks in an nn.ModuleList, or leave {flag} out",
            )
        return self.blocks

    def record(self, fact: object) -> None:
        """Add the fact of a switch. It replaces an earlier one of the same class."""
        self._facts[type(fact)] = fact

    def limit_derivatives(self, order: int, flag: str) -> None:
        """Limit the derivatives through the model that a loss may take."""
        self.derivatives_in_loss = min(self.derivatives_in_loss, Derivatives(order, flag))

    def find(self, kind: type[F]) -> F | None:
        """Return the recorded fact of a class, or None."""
        fact = self._facts.get(kind)
        return fact if isinstance(fact, kind) else None


@dataclass(frozen=True)
class Building(Generic[O_co]):
    """The run that a model is assembled for, as its transforms see it.

    Attributes:
        options: the flags of the switch that the transform belongs to. The type of a building names their class.
        plan: the plan of the run.
        workers: this process and its peers.
        try_loss: computes the user's loss of one sample with a given model, so that a transform can observe the model.
        has_values: False if only shapes are planned and the tensors of the model have no data.
        construction: divides the model over the workers while it is built. None if each worker builds all of it.
    """

    options: O_co
    plan: Plan
    workers: Workers
    try_loss: Callable[[nn.Module], Any]
    has_values: bool = True
    construction: ModelUnderConstruction | None = None


@dataclass(frozen=True)
class GatheredInFewerBits:
    """Weights that workers send in another form than the compute type.

    Attributes:
        layers: the modules whose ``weight`` it is.
        sender: makes, from a worker's rows of a weight, an object with the methods of torch's extension,
            ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
        before_forward: is called with all of these objects before each forward of the model.
    """

    layers: frozenset[nn.Module]
    sender: Callable[[torch.Tensor], Any]
    before_forward: Callable[[Sequence[Any]], None]


Transform = Callable[[Assembly, Building[O_co]], None]
"""Applies a switch to a model, in place."""
