"""What a script's loss is a mean over, by which its micro batches are weighed."""

from __future__ import annotations

from collections.abc import Mapping

from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.trainer import Trainer


def checked_targets(template: Trainer, batch: Batch, loss: str, hint: str) -> float:
    """The labels of a batch that count.

    Args:
        loss: whose mean it is, for the error.

    Raises:
        RapidformerError: it has no labels, and there are other batches beside which it must be weighed.
    """
    named = isinstance(batch, Mapping) or hasattr(batch, "get")
    sizes = template.plan.sizes
    if not (named and "labels" in batch) and sizes.data * sizes.accumulation > 1:
        raise RapidformerError(
            f"nothing tells what {loss} is a mean over: the batch has no 'labels'",
            where=f"{sizes.data * sizes.accumulation} micro batches a step, which must be weighed",
            hint=hint,
        )
    return Trainer.count_targets(template, batch)
