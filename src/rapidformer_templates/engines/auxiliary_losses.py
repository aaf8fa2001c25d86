"""Auxiliary losses of a model, in addition to the user's loss: how they enter the gradient and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.system.workers import Workers


class DividedSequences(Protocol):
    """Sequences that are divided over workers inside the blocks of a model.

    Attributes:
        length: number of tokens of the whole sequence while inside a block, otherwise None.
    """

    length: int | None

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this worker's part of a whole tensor along ``dim``. The last part is padded with zeros."""

    def gather(self, shard: torch.Tensor, length: int) -> torch.Tensor:
        """Gather [B, ``length``, …] from parts [B, S, …]. Call it on every worker that shares the sequences."""


class AuxiliaryLosses(Protocol):
    """Losses that layers add to the gradient in their backward. The user's hook does not see them.

    A step computes the gradient of the mean of the user's loss over the targets of the global batch, plus the
    gradient of the mean of these losses over its tokens.

    Attributes:
        sequences: the division of the sequences that the layers see. None if they see whole sequences.
    """

    sequences: DividedSequences | None

    def begin_step(self, microbatches: Sequence[MicroBatch], workers: Workers) -> None:
        """Inspect the micro batches of this rank. Call it on every rank."""

    def follow(self, loss: torch.Tensor, microbatch: MicroBatch, scale: float) -> None:
        """Add these losses to the backward of ``loss``, which is the loss of this micro batch times ``scale``."""

    def follow_without_loss(self, microbatch: MicroBatch, scale: torch.Tensor) -> None:
        """Add these losses to the backward of a stage without the loss, which starts with the gradient ``scale``."""

    def recorded(self) -> Any:
        """Return what the latest forward has recorded of its batch. :meth:`recall` it before a later backward."""

    def recall(self, recorded: Any) -> None:
        """Restore the result of :meth:`recorded`, for a backward that recomputes activations."""

    def results(self, workers: Workers) -> dict[str, torch.Tensor]:
        """Return values of this step for the metrics, the same on every rank. Call it on every rank."""

    def receipts(self, workers: Workers) -> dict[str, object]:
        """Return measurements of the whole run for the summary. Call it on every rank."""


class LossLayer(nn.Module):
    """A layer that adds auxiliary losses to the gradient.

    Attributes:
        losses: the auxiliary losses of the whole model.
    """

    losses: AuxiliaryLosses


def notes_about(model: nn.Module) -> list[str]:
    """Return a note if a model of transformers adds its router loss to its own loss.

    transformers computes it over all tokens of a forward (``load_balancing_loss_func``). It is a product of two means,
    so its mean over micro batches differs from its value over the whole batch.
    """
    names: dict[int, str] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "output_router_logits", False):
            names.setdefault(id(part.config), type(part).__name__)  # an inner model shares the outer one's config
    return [
        f"{name} adds a router loss per micro batch, so its loss depends on --micro-batch-size and the number of "
        "workers; with --moe-loss-coeff C, the loss is per sample"
        for name in names.values()
    ]
