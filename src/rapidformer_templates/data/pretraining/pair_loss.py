"""The loss of sentence pairs: a sum of two, of hidden tokens and of whether the texts belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.models.architectures import PairLabel


def pair_loss(model: Any, batch: Mapping[str, torch.Tensor], label: PairLabel, weight: float) -> tuple[Any, int]:
    """(sum of both losses over the batch, number of masked tokens).

    Transformers adds the mean over masked tokens and the mean over samples, which no sum over micro
    batches gives. Here each sample's pair counts as ``weight`` masked tokens; with their mean number a
    sample (``mask.probability * pairs.mean_tokens``) both means weigh the same over a global batch, and
    the loss does not depend on how that is cut.
    """
    inputs = {name: values for name, values in batch.items() if name not in ("labels", label)}
    outputs = model(**inputs)
    labels, targets = batch["labels"].flatten(), batch[label]
    pairs = outputs.sop_logits if label == "sentence_order_label" else outputs.seq_relationship_logits
    masked = cross_entropy(outputs.prediction_logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return masked + weight * cross_entropy(pairs, targets, reduction="sum"), int((labels != IGNORED).sum())
