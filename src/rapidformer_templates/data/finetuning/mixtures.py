"""Weighted mixtures of data sets: ``--data-name '0.7 a 0.3 b'``.

Samples are assigned to data sets as in a pretraining blend (:mod:`rapidformer_templates.data.indexed.blend`). At any
time each set has had its share to within one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.types import Data, Endless, SampleSet, SizeOf, size_function
from rapidformer_templates.errors import DataError

KEPT_EPOCHS = 2


class ShuffledEpochs:
    """A data set in its own order, which continues over epochs. Each epoch is a new permutation.

    There is an item ``p`` for every ``p`` from 0 on. Its epoch is ``p // len``.

    Args:
        samples: the data set.
        seed: seed of the permutations.
        number: index of the set in the mixture, so that sets of equal size get different orders.
        name: name of the set. It is part of the identity that a resumed run checks.
    """

    in_order = True
    lengths = None

    def __init__(self, samples: SampleSet, seed: int, number: int, name: str) -> None:
        self.samples = samples
        self.seed = seed
        self.number = number
        self.identity = f"{len(samples)} samples of {name}"
        self._permutations: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> object:
        return self.samples[self._index(position)]

    @property
    def size_of(self) -> SizeOf | None:
        """Returns (samples, tokens) of some items if items are rows of several samples, else None."""
        size_of = size_function(self.samples)
        return None if size_of is None else lambda positions: size_of([self._index(p) for p in positions])

    def _index(self, position: int) -> int:
        epoch, within = divmod(position, len(self.samples))
        if epoch not in self._permutations:
            for old in sorted(self._permutations)[: 1 - KEPT_EPOCHS]:
                del self._permutations[old]
            generator = np.random.default_rng((self.seed, Stream.MIXED, self.number, epoch))
            self._permutations[epoch] = generator.permutation(len(self.samples))
        return int(self._permutations[epoch][within])


def mixed(sources: Mapping[str, Data], weights: Sequence[str], seed: int) -> Data:
    """Combine several data sets: a weighted mixture for training, and concatenated validation and test parts.

    Additional named validation sets come from the first data set.

    Args:
        sources: the data of each set by name. All sets must be collated the same way.
        weights: the weights as written by the user.
        seed: seed of the orders of the sets.

    Raises:
        DataError: samples of the sets have different fields, or a weight is not a number above 0.
    """
    fields = {name: tuple(data.train[0]) for name, data in sources.items() if data.train is not None}
    if len(set(fields.values())) > 1:
        shown = "; ".join(f"{name}: {', '.join(names)}" for name, names in fields.items())
        hint = "mix sets of one kind; conversations can be mixed with plain text under --loss-on all"
        raise DataError(
            f"the sets of the mixture have samples of different kinds ({shown})", where="--data-name", hint=hint
        )
    trained = []
    for number, (name, data) in enumerate(sources.items()):
        assert data.train is not None
        assert not isinstance(data.train, Endless)  # streams are not mixed
        trained.append(ShuffledEpochs(data.train, seed, number, name))
    first = next(iter(sources.values()))
    valid = _concatenated(data.validation_sets().get("") for data in sources.values())
    named = {name: samples for name, samples in first.validation_sets().items() if name}
    return Data(
        Blend(trained, weights, flag="--data-name"),
        ({"": valid} if valid is not None else {}) | named if named else valid,
        _concatenated(data.test for data in sources.values()),
        first.collate,
        first.augment,
    )


def _concatenated(parts: Iterable[SampleSet | None]) -> SampleSet | None:
    existing: list[Any] = [part for part in parts if part is not None]  # torch asks for its own class of data sets
    return ConcatDataset(existing) if existing else None
