"""What ``build_data`` hands to the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Sample = Mapping[str, Any]
Batch = Any
"""What ``collate`` returns; usually a dict of tensors of shape (samples, …)."""


Bookmark = dict[str, Any]
"""Where a stream stands: plain values, for a checkpoint. ``position`` is the number of the sample that comes next,
``epoch`` the passes that are complete."""


class Endless(ABC):
    """Training samples without a length: item ``p`` is there for every ``p`` from 0 on, and best asked for in order.

    Attributes:
        identity: what the samples depend on, in words; a resumed run must have the same.
        bookmark: a place before the sample that was last asked for, from which it and those after it can be read again.
    """

    in_order = True
    lengths = None
    identity: str
    bookmark: Bookmark

    @abstractmethod
    def go_to(self, bookmark: Bookmark) -> None:
        """Stand where such samples stood when they gave this bookmark."""

    @abstractmethod
    def __getitem__(self, position: int) -> Any:
        """The sample at a position."""


class Rows(list[dict[str, np.ndarray]]):
    """Samples whose fields are the rows of arrays; a collate function may take the arrays instead of stacking rows.

    Attributes:
        columns: the array of each field, of shape (samples, …).
    """

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = columns
        super().__init__(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


@dataclass
class Data:
    """Data sets and how their samples become a batch.

    Attributes:
        train: what ``test`` may be, or :class:`Endless` samples, which a run by iterations takes in their order.
        valid: the same, or several such sets by their names; the metrics of each are told as ``NAME/metric``. By
            default the best checkpoint is found by the first.
        test: anything with ``len`` and integer indexing (a list, a ``datasets.Dataset``,
            a torch map-style data set); one item is one sample. A training set with ``in_order = True``
            is taken in its own order, without shuffling: it must have an item for every index from 0
            on, where ``index // len`` is the epoch.
        collate: makes a batch of a list of samples. It must not draw random numbers: what is random
            belongs in ``augment``, so that a sample does not depend on the batch that it falls into.
            Under ``--data-iterator dynamic-shape`` it is also called with ``shape=(rows, length)``, and
            must pad to exactly that; rows beyond the samples must hold no target.
        augment: changes a training sample each time it is used, drawing from the generator that it is
            given (masking, for instance). The generator depends on the seed and on the sample's place
            in the order only, so workers, micro batches and resumes cannot change it. Validation
            samples get a generator that depends on the seed and the sample's index.
        lengths: length of each training sample after ``augment``, for batches of like lengths; by
            default the lengths of its ``input_ids``.
    """

    train: Sequence[Any] | Endless | None
    valid: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None
    test: Sequence[Any] | None = None
    collate: Callable[..., Batch] | None = None
    augment: Callable[[Any, np.random.Generator], Any] | None = None
    lengths: np.ndarray | None = None

    def validation_sets(self) -> dict[str, Sequence[Any]]:
        """The validation sets that hold samples, by name; the name of one that stands alone is empty."""
        sets = self.valid if isinstance(self.valid, Mapping) else {"": self.valid}
        return {name: samples for name, samples in sets.items() if samples is not None and len(samples)}
