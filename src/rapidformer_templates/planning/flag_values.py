"""Formats of the values of some flags. Does not import torch.

Intervals are in steps, samples, tokens, minutes or epochs. Trackers are named in a list. Validation sets have names,
and mixtures of corpora have weights, as in Megatron-LM's blends: ``0.3 A 0.7 B``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Final

from rapidformer_templates.errors import DataError

UNITS: Final = {
    "step": "steps", "sample": "samples", "token": "tokens", "minute": "minutes", "min": "minutes", "epoch": "epochs",
    "steps": "steps", "samples": "samples", "tokens": "tokens", "minutes": "minutes", "epochs": "epochs", "": "steps",
}  # fmt: skip
FRACTIONAL: Final = ("minutes", "epochs")
"""Units of which an interval may have a fraction."""
_FORM = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,3})?)\s*([a-zA-Z]*)")


class Interval(str):
    """A text such as ``500`` (optimizer steps), ``20000samples``, ``5e7tokens``, ``30minutes`` or ``0.5epochs``.

    Attributes:
        size: the number. It is an integer except for minutes and epochs.
        unit: steps, samples, tokens, minutes or epochs.

    Raises:
        ValueError: the text has another form, or is less than one step, sample or token.
    """

    expected = "a number of steps, or one with its unit: 20000samples, 5e7tokens, 30minutes, 0.5epochs"
    size: Fraction
    unit: str

    def __new__(cls, text: object) -> Interval:
        size, unit = _size_and_unit(text, cls.expected)
        if unit not in FRACTIONAL and size != int(size):
            raise ValueError(cls.expected)
        self = super().__new__(cls, _spelled(size, "" if unit == "steps" else unit))
        self.size, self.unit = size, unit
        return self

    def passed(self, before: Fraction | int, after: Fraction | int) -> bool:
        """Return whether a multiple of the interval is above ``before`` and at most ``after``, in its unit."""
        return after // self.size > before // self.size


class Epochs(str):
    """A text such as ``3epochs`` or ``0.5epochs``: passes over the training data, in a flag that counts steps.

    Attributes:
        size: the number of passes.

    Raises:
        ValueError: the text has another form or another unit.
    """

    expected = "a number of steps, or of passes over the training data: 3epochs"
    size: Fraction

    def __new__(cls, text: object) -> Epochs:
        size, unit = _size_and_unit(text, cls.expected)
        if unit != "epochs":
            raise ValueError(cls.expected)
        self = super().__new__(cls, _spelled(size, unit))
        self.size = size
        return self

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps that ``--epochs`` takes for these passes. A fraction of a step is rounded up."""
        return math.ceil(self.size * steps_per_epoch)


def _size_and_unit(text: object, expected: str) -> tuple[Fraction, str]:
    """Return the number and the unit of a text.

    Raises:
        ValueError: the text has another form, or the number is zero as a float.
    """
    matched = _FORM.fullmatch(str(text).strip())
    unit = UNITS.get(matched[2].lower()) if matched else None
    size = Fraction(matched[1]) if matched else Fraction()
    if unit is None or not float(size):
        raise ValueError(expected)
    return size, unit


def _spelled(size: Fraction, unit: str) -> str:
    return f"{Decimal(f'{float(size):.15g}'):f}{unit}"  # without a negative exponent, which no flag takes


_SCALES: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class TokenCount(int):
    """A number of tokens from a text such as ``300B``, ``1.5T``, ``2e9`` or ``5000000``.

    Raises:
        ValueError: the text has another form, or is not a whole number of at least one token.
    """

    expected = "a number of tokens, such as 300B, 1.5T, 20M or 2e9"

    def __new__(cls, text: object) -> TokenCount:
        matched = _FORM.fullmatch(str(text).strip())
        scale = _SCALES.get(matched[2].lower()) if matched else None
        count = Fraction(matched[1]) * scale if matched and scale else Fraction()
        if not count or count.denominator != 1:
            raise ValueError(cls.expected)
        return super().__new__(cls, count)


class WorkerCounts(str):
    """A text such as ``8``, or ``8,16,32`` for several sizes of a cluster.

    Attributes:
        counts: the numbers of workers.

    Raises:
        ValueError: a part is not a whole number from 1 to a million, or occurs twice.
    """

    expected = "a number of workers from 1 to 1,000,000, or several separated by commas: 8,16,32"
    counts: tuple[int, ...]

    def __new__(cls, text: object) -> WorkerCounts:
        counts = tuple(int(word) for word in str(text).split(","))
        if min(counts) < 1 or max(counts) > 1_000_000 or len(set(counts)) < len(counts):
            raise ValueError(cls.expected)
        self = super().__new__(cls, ",".join(map(str, counts)))
        self.counts = counts
        return self


TRACKERS: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The trackers, each with the module that must be installed."""

TRACKERS_INSTALL: Final = {
    **dict.fromkeys(("tensorboard", "wandb", "mlflow"), "pip install 'rapidformer_templates[trackers]'"),
    "trackio": "pip install trackio",
}


class TrackerNames(str):
    """A text such as ``tensorboard,wandb``. ``all`` means every installed tracker, ``none`` means no tracker.

    Attributes:
        names: the trackers in the text, without ``all`` and ``none``.

    Raises:
        ValueError: the text contains something else, or a name twice.
    """

    expected = f"names of {', '.join(TRACKERS)} separated by commas, all or none"
    names: tuple[str, ...]

    def __new__(cls, value: object) -> TrackerNames:
        words = value if isinstance(value, list | tuple) else str(value).split(",")
        names = tuple(str(word).strip().lower() for word in words)
        alone = names in (("all",), ("none",))
        if not alone and (not set(names) <= TRACKERS.keys() or len(set(names)) < len(names)):
            raise ValueError(cls.expected)
        self = super().__new__(cls, ",".join(names))
        self.names = () if alone else names
        return self


def chosen_trackers(requested: str | None, installed: Container[str]) -> tuple[str, ...]:
    """Return the trackers of a run.

    Args:
        requested: the value of ``--report-to``.
        installed: the installed modules.
    """
    if requested == "all":
        return tuple(name for name, package in TRACKERS.items() if package in installed)
    return TrackerNames(requested).names if requested else ()  # other processes pass it as plain text


TEST = "test"
"""The name of the test part among the evaluated sets."""
SET_NAME = re.compile(r"[\w.-]+")
"""Valid names of validation sets."""


def named_sets(words: Sequence[str] | None, flag: str) -> dict[str, str]:
    """Parse words such as ``hard=FILE`` to sets by name. The name of a set without one is the set itself.

    Raises:
        DataError: a name is invalid, appears twice, or is the name of the test part.
    """
    sets: dict[str, str] = {}
    for word in words or ():
        name, equals, of = word.partition("=")
        if not SET_NAME.fullmatch(name) or (equals and not of):
            message = f"'{word}' is not the name of a set"
            raise DataError(message, where=flag, hint="write NAME=SET, as in hard=hard.jsonl")
        if name == TEST:
            hint = "--evaluate-test evaluates the test part, at the end; give another set another name"
            raise DataError("a validation set is called test", where=flag, hint=hint)
        if name in sets:
            raise DataError(f"two sets are called {name}", where=flag, hint="give each its own name: NAME=SET")
        sets[name] = of or name
    return sets


def weighted(words: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """Parse words to (weight, name) pairs. Weights keep their spelling. Empty if the first word is not a weight.

    Args:
        words: weights and names, alternating.
        flag: the flag of these words, for messages.

    Raises:
        DataError: weights and names do not alternate.
    """
    if len(words) < 2 or not _is_weight(words[0]):
        return []
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(_is_weight(weight) and not _is_weight(name) for weight, name in pairs):
        hint = "write a weight before each corpus: 0.3 A 0.7 B"
        raise DataError("weights and corpora do not alternate", where=f"{flag} {' '.join(words)}", hint=hint)
    return pairs


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return not Path(word).exists()


def mixture_of(data_name: str | None) -> list[tuple[str, str]]:
    """Return (weight, name) of each data set if ``--data-name`` names a mixture. Empty if it names one set.

    Raises:
        DataError: weights and names do not alternate, or a data set is named twice.
    """
    pairs = weighted((data_name or "").split(), "--data-name")
    names = [name for _, name in pairs]
    if len(set(names)) < len(names):
        raise DataError("a data set is named twice", where=f"--data-name {data_name}", hint="add its weights up")
    return pairs
