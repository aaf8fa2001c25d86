"""The number of targets that a script's loss averages over. It is the weight of a micro batch."""

from __future__ import annotations

from collections.abc import Mapping

from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.trainer import Trainer


def checked_targets(template: Trainer, batch: Batch, loss: str, hint: str) -> float:
    """Return the number of labels of a batch that count.

    Args:
        loss: name of the loss, for the error message.
        hint: hint of the error message.

    Raises:
        RapidformerError: the batch has no labels, and a step has other micro batches, so that it needs a weight.
    """
    named = isinstance(batch, Mapping) or hasattr(batch, "get")
    sizes = template.plan.sizes
    if not (named and "labels" in batch) and sizes.data * sizes.accumulation > 1:
        raise RapidformerError(
            f"cannot tell what {loss} is a mean over: the batch has no 'labels'",
            where=f"{sizes.data * sizes.accumulation} micro batches per step, which must be weighted",
            hint=hint,
        )
    return Trainer.count_targets(template, batch)
