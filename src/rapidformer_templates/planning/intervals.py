"""Intervals in steps, samples, tokens, minutes or epochs, and lengths in epochs."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

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
        ValueError: the text has another form, or the number is zero.
    """
    matched = _FORM.fullmatch(str(text).strip())
    unit = UNITS.get(matched[2].lower()) if matched else None
    size = Fraction(matched[1]) if matched else Fraction()
    if unit is None or not size:
        raise ValueError(expected)
    return size, unit


def _spelled(size: Fraction, unit: str) -> str:
    return f"{float(size):.15g}{unit}"
