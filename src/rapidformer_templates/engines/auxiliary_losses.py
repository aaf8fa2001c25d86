"""Losses that a model brings itself, beside the user's: how they enter the gradient and the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.system.workers import Workers

ATTRIBUTE = "auxiliary_losses"
"""Of a model that has such losses: an :class:`AuxiliaryLosses`."""


class DividedSequences(Protocol):
    """Sequences of which each worker has a stretch, inside of the blocks of a model.

    Attributes:
        length: tokens of the whole sequence inside of a block, None elsewhere.
    """

    length: int | None

    def stretch(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This worker's part of a whole tensor along ``dim``; what fills the last stretch up is zeros."""

    def gather(self, stretch: torch.Tensor, length: int) -> torch.Tensor:
        """[B, ``length``, …] of stretches [B, S, …]; every worker that shares the sequences must ask for it."""


class AuxiliaryLosses(Protocol):
    """Losses that layers add to the gradient in their backward; the user's hook knows nothing of them.

    The gradient of a step is that of the mean of the user's loss over the targets of the global batch, plus
    that of the mean of these losses over its tokens.

    Attributes:
        sequences: what divides the sequences that the layers see; None where they see whole ones.
    """

    sequences: DividedSequences | None

    def begin_step(self, microbatches: Sequence[MicroBatch], workers: Workers) -> None:
        """Look at the micro batches of this rank; every rank must call it."""

    def follow(self, loss: torch.Tensor, microbatch: MicroBatch, scale: float) -> None:
        """Take part in the backward of ``loss``, which is this micro batch's times ``scale``."""

    def follow_without_loss(self, microbatch: MicroBatch, scale: torch.Tensor) -> None:
        """Take part in the backward of a stage without the loss, whose own begins with the gradient ``scale``."""

    def seen(self) -> Any:
        """What the latest forward has seen of its batch: to be recalled before a backward that is not the next one."""

    def recall(self, seen: Any) -> None:
        """Have again what ``seen`` gave, for a backward that computes activations anew."""

    def results(self, workers: Workers) -> dict[str, torch.Tensor]:
        """Values of this step for the metrics, the same on every rank; every rank must call it."""

    def receipts(self, workers: Workers) -> dict[str, Any]:
        """What the whole run has measured, for the summary; every rank must call it."""


def auxiliary_losses_of(model: nn.Module) -> AuxiliaryLosses | None:
    """Those of a model, if it has any."""
    losses: AuxiliaryLosses | None = getattr(model, ATTRIBUTE, None)
    return losses


def receipts_of(model: nn.Module, workers: Workers) -> Mapping[str, Any]:
    """What a model's own losses have measured; nothing if it has none."""
    losses = auxiliary_losses_of(model)
    return losses.receipts(workers) if losses else {}
