"""What the loop asks of an engine. The unit is one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.system.workers import Workers

ComputeLoss = Callable[[Any, Batch], Any]
"""The user's hook: mean loss of the batch, or (sum of losses, number of targets)."""


@dataclass
class StepResult:
    """What a step did; the same on every rank.

    Attributes:
        loss: mean over the targets of the global batch, a tensor of no dimensions.
        grad_norm: global norm of the gradient of that loss before clipping.
        skipped: the step was left out because its scaled gradient overflowed (fp16).
        measured: what else there is for the metrics, such as losses that the model brings itself.

    On a GPU all of them are there when the device comes to them: to read one is to wait for the device.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: bool | torch.Tensor = False
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A box of a parameter or of its optimizer state that this rank holds.

    Attributes:
        name: canonical name; of optimizer state, ``parameter/key``.
        tensor: the values.
        shape: of the whole tensor.
        offset: where the box begins in it.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class StateReader(Protocol):
    """Reads boxes of a checkpoint's tensors."""

    def names(self, kind: str) -> Mapping[str, tuple[int, ...]]:
        """Names and whole shapes of the tensors of a kind, ``weights`` or ``optimizer``."""

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of ``shape`` at ``offset`` of a tensor."""


class Engine(Protocol):
    """Owns synchronisation, precision, loss scale, clipping, the step and zeroing.

    Attributes:
        model: as it was built, with what the engine made of its parameters.
        optimizer: over those parameters.
        compute_loss: the user's hook.
        workers: this process among its peers.
        micro_steps: backward passes so far.
        update_rule: the class that makes the updates, wherever its state lies.
        receipts: what the engine itself has measured.
        before_update: called between the last backward and the update, while the gradients are there.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    compute_loss: ComputeLoss
    workers: Workers
    micro_steps: int
    update_rule: type[torch.optim.Optimizer]
    receipts: Mapping[str, Any]
    before_update: Callable[[], None] | None

    def build_context(self) -> AbstractContextManager[Any]:
        """What ``build_model`` runs in."""

    def setup(self, model: nn.Module, optimizer: OptimizerSpec, compute_loss: ComputeLoss) -> None:
        """Wrap or shard the model and build the optimizer."""

    def train_batch(
        self, microbatches: Sequence[MicroBatch], targets: float, lr_factor: float | Callable[[], float]
    ) -> StepResult:
        """One optimizer step.

        Args:
            microbatches: those of this rank.
            targets: number of targets in the global batch, over all ranks and micro batches.
            lr_factor: share of the peak learning rate, or a function that is asked for it right before the update.

        Raises:
            NonFiniteLoss: loss or gradient is infinite or NaN, in this step or in one before it of which the
                host hears only now; the weights are as before that step.
        """

    def hear_all(self) -> None:
        """Hear of all steps so far; called before anything is written or saved of them. Raises as ``train_batch``."""

    def eval_batch(self, microbatch: MicroBatch, compute_loss: ComputeLoss | None = None) -> tuple[float, Any]:
        """(sum of the losses over the targets, what the model put out), with gradients off.

        Args:
            compute_loss: takes the place of the user's hook.
        """

    def frozen(self, model: nn.Module) -> nn.Module:
        """A second model, which is never trained, divided over the workers as the engine divides the trained one."""

    def precision(self) -> AbstractContextManager[Any]:
        """What ``compute_loss`` is called in: autocast, where the engine computes in 16 bits."""

    def measuring(self) -> AbstractContextManager[nn.Module]:
        """The model for a forward that leaves no trace: random numbers, buffers and gradients are as before it."""

    def held(self) -> dict[str, list[torch.Tensor]]:
        """What this rank holds now of ``parameters``, ``gradients``, ``optimizer`` state and ``buckets`` to send."""

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the weights; called after :meth:`setup`."""

    def averaged(self) -> AbstractContextManager[None]:
        """The averages in the place of the weights, if they are kept; every rank must enter."""

    def pieces(self, kind: str) -> Iterator[Piece]:
        """What this rank has to write of ``weights`` or ``optimizer``; every value is written once."""

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        """Take the weights and, if asked, the optimizer state from a checkpoint.

        Raises:
            CheckpointError: names, shapes or the kind of optimizer differ; nothing was changed.
        """

    def state(self) -> dict[str, Any]:
        """What else must be kept: plain values for JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The reverse of :meth:`state`."""

    def full_weights(self) -> dict[str, torch.Tensor] | None:
        """Whole weights on the host on rank 0 for the export, None elsewhere; every rank must call it."""
