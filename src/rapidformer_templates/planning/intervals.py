"""Intervals in steps, samples, tokens or minutes."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {
    "step": "steps", "sample": "samples", "token": "tokens", "minute": "minutes", "min": "minutes",
    "steps": "steps", "samples": "samples", "tokens": "tokens", "minutes": "minutes", "": "steps",
}  # fmt: skip
_FORM = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([a-zA-Z]*)")


class Interval(str):
    """A text such as ``500`` (optimizer steps), ``20000samples``, ``5e7tokens`` or ``30minutes``.

    Attributes:
        size: the number. It is an integer except for minutes.
        unit: steps, samples, tokens or minutes.

    Raises:
        ValueError: the text has another form, or is less than one step, sample or token.
    """

    expected = "a number of steps, or one with its unit: 20000samples, 5e7tokens, 30minutes"
    size: float
    unit: str

    def __new__(cls, text: object) -> Interval:
        matched = _FORM.fullmatch(str(text).strip())
        unit = UNITS.get(matched[2].lower()) if matched else None
        if matched is None or unit is None:
            raise ValueError(cls.expected)
        count = float(matched[1])
        if count <= 0 or (unit != "minutes" and count != int(count)):
            raise ValueError(cls.expected)
        self = super().__new__(cls, f"{count:.15g}" if unit == "steps" else f"{count:.15g}{unit}")
        self.size, self.unit = count, unit
        return self

    def passed(self, before: int, after: int) -> bool:
        """Return whether a multiple of the interval is above ``before`` and at most ``after``, in its unit."""
        return after // int(self.size) > before // int(self.size)
