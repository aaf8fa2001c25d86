"""What ``build_data`` hands to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Sample = Mapping[str, Any]
Batch = Any
"""What ``collate`` returns; usually a dict of tensors of shape (samples, …)."""


@dataclass
class Data:
    """Data sets and how their samples become a batch.

    Attributes:
        train, valid, test: anything with ``len`` and integer indexing (a list, a ``datasets.Dataset``,
            a torch map-style data set); one item is one sample. A training set with ``in_order = True``
            is taken in its own order, without shuffling: it must have an item for every index from 0
            on, where ``index // len`` is the epoch.
        collate: makes a batch of a list of samples. It must not draw random numbers: what is random
            belongs in ``augment``, so that a sample does not depend on the batch that it falls into.
        augment: changes a training sample each time it is used, drawing from the generator that it is
            given (masking, for instance). The generator depends on the seed and on the sample's place
            in the order only, so workers, micro batches and resumes cannot change it. Validation
            samples get a generator that depends on the seed and the sample's index.
        lengths: length of each training sample, for batches of like lengths; by default the lengths
            of its ``input_ids``.
    """

    train: Sequence[Any] | None
    valid: Sequence[Any] | None = None
    test: Sequence[Any] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    augment: Callable[[Any, np.random.Generator], Any] | None = None
    lengths: np.ndarray | None = None
