"""The loss of sentence pairs: the loss of masked tokens plus that of whether the texts belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.models.architectures import PairLabel


def pair_loss(model: Any, batch: Mapping[str, torch.Tensor], label: PairLabel, weight: float) -> tuple[Any, int]:
    """Return (sum of both losses over the batch, number of masked tokens).

    Transformers adds the mean over masked tokens and the mean over samples, which cannot be computed as a sum over
    micro batches. Here each sample's pair counts as ``weight`` masked tokens. If ``weight`` is their mean number per
    sample (``mask.probability * pairs.mean_tokens``), both means have the same weight over a global batch, and the loss
    does not depend on how the batch is divided.
    """
    inputs = {name: values for name, values in batch.items() if name not in ("labels", label)}
    outputs = model(**inputs)
    labels, targets = batch["labels"].flatten(), batch[label]
    pairs = outputs.sop_logits if label == "sentence_order_label" else outputs.seq_relationship_logits
    masked = cross_entropy(outputs.prediction_logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return masked + weight * cross_entropy(pairs, targets, reduction="sum"), int((labels != IGNORED).sum())
