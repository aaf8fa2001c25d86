"""Weighted blends of corpora, and mixtures of fine-tuning sets (``--data-name '0.7 a 0.3 b'``).

After any number of samples, each set has had its share to within one sample: the quota method of Balinski and Young
(1975). Each sample comes from a set that is behind its share, namely the one whose next sample is due first.
Megatron-LM takes the set that is furthest behind, which has no such bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Any, Protocol

import numpy as np
from torch.utils.data import ConcatDataset

from rapidformer_templates.data.indexed.corpora import IndexCache, Tables
from rapidformer_templates.data.order import Passes, Stream, keep_apart
from rapidformer_templates.data.types import Data, Endless, SampleSet
from rapidformer_templates.errors import DataError
from rapidformer_templates.system.files import hash_of

LONGEST_PERIOD = 2**20
"""Maximum period of the order of a blend, in samples. Weights with a longer period are rounded to parts of it."""


def whole_weights(weights: Sequence[str | float], flag: str = "--data-path") -> list[int]:
    """Return the smallest integers in the ratio of the weights. Weights are read exactly as written.

    If the integers would sum to more than :data:`LONGEST_PERIOD`, they are rounded to about that sum. ``flag`` is the
    flag with the weights, for messages.

    Raises:
        DataError: a weight is not a number above 0.
    """
    try:
        shares = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError):
        shares = []
    if not shares or min(shares) <= 0:
        hint = "write a weight above 0 before each corpus: 0.3 A 0.7 B"
        raise DataError(f"these are not weights: {', '.join(map(str, weights))}", where=flag, hint=hint)
    scale = lcm(*(share.denominator for share in shares))
    counts = [int(share * scale) for share in shares]
    divisor = gcd(*counts)
    counts = [count // divisor for count in counts]
    if sum(counts) <= LONGEST_PERIOD:
        return counts
    total = sum(counts)
    return [max(1, round(Fraction(count * LONGEST_PERIOD, total))) for count in counts]


def quota_order(weights: Sequence[int]) -> np.ndarray:
    """Return the set of each sample in one period, int16 of shape (sum of the weights,)."""
    total, sets = sum(weights), range(len(weights))
    order = np.empty(total, np.int16)
    counts = [0] * len(weights)
    due = [-(-total // weight) for weight in weights]
    for sample in range(total):
        best, soonest = -1, total + 1
        for i in sets:
            # The set is behind its share, including this sample, and due first.
            if due[i] < soonest and counts[i] * total < weights[i] * (sample + 1):
                best, soonest = i, due[i]
        order[sample] = best
        counts[best] += 1
        due[best] = -(-(counts[best] + 1) * total // weights[best])
    return order


class OrderedSamples(SampleSet, Protocol):
    """Samples in their own order. There is an item ``p`` for every ``p`` from 0 on."""

    @property
    def identity(self) -> str:
        """Describes everything that the samples depend on. A resumed run must have the same."""


class Blend:
    """Several data sets, each in its own order, combined into one. There is an item ``p`` for every ``p`` from 0 on.

    A set that is small for its weight begins its next epoch earlier than the others.

    Args:
        sets: the data sets, each in its own order. None of them is empty.
        weights: their shares of the samples. See :func:`whole_weights`.
        repeats: ``len`` is the total number of samples of all sets. Otherwise it is the number of samples before one of
            the sets repeats, as for an evaluation.
        cache: stores the order of a long period.
        flag: the flag with the weights, for messages.
    """

    in_order = True
    lengths = None

    def __init__(
        self,
        sets: Sequence[OrderedSamples],
        weights: Sequence[str | float],
        *,
        repeats: bool = True,
        cache: IndexCache | None = None,
        flag: str = "--data-path",
    ) -> None:
        self.sets = list(sets)
        self.weights = whole_weights(weights, flag)
        self.cache = cache or IndexCache()
        self.period = sum(self.weights)
        if repeats:
            self.samples = sum(map(len, self.sets))
            return
        ends = []
        for i, samples in enumerate(self.sets):
            periods, rest = divmod(len(samples), self.weights[i])
            ends.append(periods * self.period + int(np.flatnonzero(self._tables["order"] == i)[rest]))
        self.samples = min(ends)

    @cached_property
    def _tables(self) -> Tables:
        """``order``: the set of each sample in a period. ``ranks``: how many samples of that set come before it."""
        return self.cache("blend-" + hash_of(self.weights), self._make_tables)

    def _make_tables(self) -> Tables:
        order = quota_order(self.weights)
        ranks = np.empty(self.period, np.int32)
        for i in range(len(self.weights)):
            in_set = order == i
            ranks[in_set] = np.arange(self.weights[i])
        return {"order": order, "ranks": ranks}

    @property
    def identity(self) -> str:
        """Everything except the seed that the samples depend on. A resumed run must have the same."""
        return ", ".join(f"{w} of ({s.identity})" for w, s in zip(self.weights, self.sets, strict=True))

    def keep_apart(self, count: int) -> None:
        """Let no set repeat a sample within ``count`` consecutive samples. It has its share of them, or two more."""
        for samples, weight in zip(self.sets, self.weights, strict=True):
            keep_apart(samples, min(count, count * weight // self.period + 2))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, position: int) -> object:
        if position < 0:
            position = range(len(self))[position]
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[object]:
        """Return several items at once."""
        sources, within = self.origin(np.asarray(positions, np.int64))
        items: list[object] = [None] * len(within)
        for source in np.unique(sources):
            from_source = np.flatnonzero(sources == source)
            chosen, indices = self.sets[source], within[from_source].tolist()
            many = getattr(chosen, "__getitems__", None)
            read_items = many(indices) if many else [chosen[index] for index in indices]
            for i, item in zip(from_source, read_items, strict=True):
                items[i] = item
        return items

    def origin(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (set, position in that set) for each position."""
        periods, within = np.divmod(positions, self.period)
        sources = self._tables["order"][within].astype(np.int64)
        return sources, periods * np.asarray(self.weights)[sources] + self._tables["ranks"][within]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}


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
        self.identity = f"{len(samples)} samples of {name} in whole passes"
        self.keep_apart(1)

    def keep_apart(self, count: int) -> None:
        """Let any ``count`` consecutive samples be distinct, if there are as many."""
        self._passes = Passes(len(self.samples), (self.seed, Stream.MIXED, self.number), count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> object:
        epoch, within = divmod(position, len(self.samples))
        return self.samples[int(self._passes[epoch][within])]


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
        message = f"the sets of the mixture have samples of different kinds ({shown})"
        raise DataError(message, where="--data-name", hint=hint)
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
        augments_evaluation=first.augments_evaluation,
    )


def _concatenated(parts: Iterable[SampleSet | None]) -> SampleSet | None:
    existing: list[Any] = [part for part in parts if part is not None]  # torch asks for its own class of data sets
    return ConcatDataset(existing) if existing else None
