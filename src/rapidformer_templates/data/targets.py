"""Counts the targets of a batch, which its mean loss averages over."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from rapidformer_templates.data.types import Batch

IGNORED = -100
"""The label that torch's cross-entropy ignores."""


def count_targets(batch: Batch, *, shifted: bool) -> float:
    """Count the labels that are not -100, or the samples if there are no labels.

    Args:
        batch: a mapping with ``labels`` of shape (samples,) or (samples, tokens), or anything else. If it has labels
            that are already shifted (``shift_labels``), those are counted.
        shifted: the model compares token ``t`` with label ``t + 1``, so each sample's first label is unused.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if labels is None:
        return samples_in(batch)
    if "shift_labels" in batch:
        labels, shifted = batch["shift_labels"], False
    if labels.is_floating_point():
        return len(labels)  # a regression: its loss is a mean over the samples
    if shifted and labels.ndim > 1:
        labels = labels[:, 1:]
    if labels.is_cpu:
        return int(np.count_nonzero(labels.numpy() != IGNORED))  # several times faster than torch for so few numbers
    return int((labels != IGNORED).sum())


def samples_in(batch: Batch) -> int:
    """Return the first dimension of a batch's tensors, or 0 if there is none.

    Args:
        batch: tensors in dicts, lists and tuples, or in another mapping (transformers' ``BatchEncoding``).
    """
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0), 0)


def shifted_left(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels of shape (samples, tokens) left by one token. The last position is ignored."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
