"""How many targets a batch has: what the mean loss is a mean over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

IGNORED = -100
"""The label that torch's cross-entropy leaves out."""


def count_targets(batch: Any, *, shifted: bool) -> float:
    """Labels that are not -100; without labels, the samples.

    Args:
        batch: a mapping with ``labels`` of shape (samples,) or (samples, tokens), or anything else. Labels
            that are shifted already (``shift_labels``) are the ones that count.
        shifted: the model compares token ``t`` with label ``t + 1``, so each sample's first label is none.
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


def samples_in(batch: Any) -> int:
    """Length of the first dimension of a batch's tensors; 0 where there is none.

    Args:
        batch: tensors in dicts, lists and tuples, or in another mapping (transformers' ``BatchEncoding``).
    """
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0), 0)


def shifted_left(labels: torch.Tensor) -> torch.Tensor:
    """At each place of (samples, tokens) the label of the next; there is none behind the last."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
