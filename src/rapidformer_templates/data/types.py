"""The types that ``build_data`` returns to the loop, and checks of what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flag_values import SET_NAME, TEST

if TYPE_CHECKING:
    import torch

Sample = Mapping[str, Any]
"""A sample with named fields, usually rows of tokens and labels."""

Batch = Any
"""The return value of ``collate``, usually a dict of tensors of shape (samples, …)."""

Augment = Callable[[Any, np.random.Generator], Any]
"""Changes a training sample each time it is used. See :class:`Data`."""


class SampleSet(Protocol):
    """Anything with ``len`` and integer indexing. One item is one sample, of any type."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ModelOutputs(Protocol):
    """The outputs of a transformers model: tensors by name, such as ``loss`` and ``logits``."""

    def __getattr__(self, name: str, /) -> torch.Tensor: ...


Tensors = Mapping[str, "torch.Tensor"]
"""The batch of a task: tensors by name, of shape (samples, …)."""

Model = Callable[..., ModelOutputs]
"""A model of transformers as a loss calls it. Under a pipeline it returns the outputs of the last stage."""


Bookmark = dict[str, Any]
"""The position of a stream as plain values, for a checkpoint.

``position`` is the number of the next sample, and ``epoch`` is the number of complete passes.
"""


class Endless(ABC):
    """Training samples without a length. Item ``p`` exists for every ``p`` from 0 on. Reading in order is fastest.

    Attributes:
        identity: what the samples depend on, as a text. A resumed run must have the same.
        bookmark: a position at or before the last sample that was read. Reading can restart there.
    """

    in_order = True
    lengths = None
    identity: str
    bookmark: Bookmark

    @abstractmethod
    def go_to(self, bookmark: Bookmark) -> None:
        """Move to the position where such samples returned this bookmark."""

    @abstractmethod
    def __getitem__(self, position: int, /) -> Any:
        """Return the sample at a position."""


class Rows(list[dict[str, np.ndarray]]):
    """Samples whose fields are rows of arrays. A collate function can use the arrays instead of stacking rows.

    Attributes:
        columns: the array of each field, of shape (samples, …).
    """

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = columns
        super().__init__(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


@dataclass
class Data:
    """Data sets, and how their samples become a batch.

    Attributes:
        train: the same as ``test``, or :class:`Endless` samples, which a run by iterations reads in order.
        valid: the same as ``test``, or several such sets by name. Their metrics are reported as ``NAME/metric``. By
            default the first set decides which checkpoint is best.
        test: anything with ``len`` and integer indexing (a list, a ``datasets.Dataset``, a torch map-style data set).
            One item is one sample. A training set with ``in_order = True`` is read in its own order, without shuffling.
            It must have an item for every index from 0 on, where ``index // len`` is the epoch.
        collate: makes a batch from a list of samples. It must not draw random numbers. Put randomness into ``augment``,
            so that a sample does not depend on its batch. Under ``--data-iterator dynamic-shape`` it is also called
            with ``shape=(rows, length)``, and must pad to exactly that shape. Rows beyond the samples must have no
            target.
        augment: changes a training sample each time it is used. It must draw from the generator that it receives. The
            generator depends only on the seed and on the sample's position in the order, so workers, micro batches and
            resuming cannot change it.
        lengths: length of each training sample after ``augment``, for batches of similar lengths. The default is the
            length of its ``input_ids``.
        augments_evaluation: evaluated samples go through ``augment``, too, as those of a masked language model must.
            Their generator depends on the seed and the sample's index.
    """

    train: SampleSet | Endless | None
    valid: SampleSet | Mapping[str, SampleSet] | None = None
    test: SampleSet | None = None
    collate: Callable[..., Batch] | None = None
    augment: Augment | None = None
    lengths: np.ndarray | None = None
    augments_evaluation: bool = False

    def validation_sets(self) -> dict[str, SampleSet]:
        """Return the non-empty validation sets by name. A single unnamed set has the name ``""``."""
        sets = self.valid if isinstance(self.valid, Mapping) else {"": self.valid}
        return {name: samples for name, samples in sets.items() if samples is not None and len(samples)}


def kind_of(value: object) -> str:
    """Describe the type of a value for a message: ``None``, ``a list``, ``an AdamW``, ``the class AdamW``."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def checked_data(data: object) -> Data:
    """Check the return value of ``build_data``.

    Raises:
        DataError: it is not a :class:`Data`, or a part of it cannot be indexed or called.
    """
    if not isinstance(data, Data):
        hint = "return Data(train=samples, valid=held_out, collate=collate)"
        if hasattr(data, "dataset") and hasattr(data, "collate_fn"):
            hint = "the loop makes the loaders: return Data(train=loader.dataset, collate=loader.collate_fn)"
        raise DataError(f"build_data returned {kind_of(data)}", where="build_data()", hint=hint)
    several = data.valid if isinstance(data.valid, Mapping) else {"": data.valid}
    for name in several:
        # Refuse a name of a validation set that metrics cannot use.
        if not isinstance(name, str) or not (name == "" or SET_NAME.fullmatch(name)) or name == TEST:
            hint = "use letters, digits, '.', '_' and '-' in their names, and call none of them test"
            raise DataError(f"a validation set of build_data is called {name!r}", where="Data(valid=…)", hint=hint)
    sets = {"train": data.train, "test": data.test, **{f"valid {name}".strip(): one for name, one in several.items()}}
    for part, samples in sets.items():
        # A mapping has both, but its keys are columns or names of parts.
        indexed = isinstance(samples, Sized) and hasattr(samples, "__getitem__") and not isinstance(samples, Mapping)
        endless = part == "train" and isinstance(samples, Endless)
        if samples is not None and not indexed and not endless:
            message = f"the {part} samples of build_data are {kind_of(samples)}"
            hint = "give anything with len and integer indexing, one item per sample: a list, a datasets.Dataset"
            raise DataError(message, where=f"Data({part.split()[0]}=…)", hint=hint)
    for part in ("collate", "augment"):
        function = getattr(data, part)
        if function is not None and not callable(function):
            raise DataError(f"{part} of build_data is {kind_of(function)}, not a function", where=f"Data({part}=…)")
    return data
