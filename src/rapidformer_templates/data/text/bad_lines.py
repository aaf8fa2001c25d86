"""Lines and rows that cannot be used: either all of them are left out and counted, or all are one error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rapidformer_templates.errors import DataError, counted

LISTED = 5
"""Number of bad lines that an error shows."""

MAX_COUNTED = 100_000
"""Reading ends with an error at this number of bad lines. The file has another form then."""

ADVICE = "fix the line, or skip such lines with --skip-bad-lines"

_ENTRY = re.compile(r"(?P<where>.*?(?::\d+|, row \d+)): (?P<reason>.*)", re.DOTALL)
_NUMBER = re.compile(r"('[^']*')|\d+(?:( \w+?)s?\b)?")
"""A number outside of quotes, with the noun after it. Quoted values are names of columns and labels."""


@dataclass
class BadLines:
    """How to handle lines that cannot be used.

    Attributes:
        skip: leave them out. Otherwise :meth:`raise_all` raises one error about all of them.
        skipped: ``file:line: reason`` of each line that was left out.
        advice: what to do about a line, for the error.
        counts: number of lines that the error is about, by reason. Reasons that differ only in numbers count as one.
        shown: location, reason and hint of the first of them.
    """

    skip: bool = False
    skipped: list[str] = field(default_factory=list)
    advice: str = ADVICE
    counts: Counter[str] = field(default_factory=Counter)
    shown: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, path: Path, line: int, reason: str, hint: str = "") -> None:
        """Record a line of a file."""
        self.note_at(f"{path}:{line}", reason, hint)

    def note_at(self, where: str, reason: str, hint: str = "") -> None:
        """Record a line, or a row of a file without lines."""
        if self.skip:
            self.skipped.append(f"{where}: {reason}")
            return
        self.counts[_without_numbers(reason)] += 1
        if len(self.shown) < LISTED:
            self.shown.append((where, reason, hint))
        if self.counts.total() == MAX_COUNTED:
            self.raise_all(is_part=True)

    def raise_all(self, *, is_part: bool = False) -> None:
        """Raise a :class:`DataError` if lines were recorded that must not be left out.

        Args:
            is_part: more lines may follow that were not read.
        """
        if not self.shown:
            return
        hint = "; ".join(dict.fromkeys(text for text in (*(hint for *_, hint in self.shown), self.advice) if text))
        count, (first, reason, _) = self.counts.total(), self.shown[0]
        if count == 1:
            raise DataError(reason, where=first, hint=hint)
        least = "at least " if is_part else ""
        if len(self.counts) == 1:
            message, places = f"{reason}, in {least}{count:,} rows", [where for where, *_ in self.shown]
        else:
            message = f"{least}{count:,} rows cannot be used"
            places = [f"{where}: {reason}" for where, reason, _ in self.shown]
        if count > len(places):
            places.append(f"… and {count - len(places):,} more")
        raise DataError(message, where="\n         ".join(places), hint=hint)


def add_by_reason(counts: Mapping[str, int], skipped: Iterable[str]) -> dict[str, int]:
    """Add lines that were left out to the counts of earlier ones, and return the new counts.

    Args:
        counts: number of lines for each reason. The key is the first of these lines.
        skipped: ``file:line: reason`` of further lines. Reasons that differ only in numbers count as one.
    """
    totals = dict(counts)
    firsts = {_kind_of(entry): entry for entry in totals}
    for entry in skipped:
        first = firsts.setdefault(_kind_of(entry), entry)
        totals[first] = totals.get(first, 0) + 1
    return totals


def describe_skipped(counts: Mapping[str, int]) -> str:
    """Return how many lines were left out, and a line for each reason with its first line. Most frequent first."""
    total = sum(counts.values())
    lines = [f"left out {counted(total, 'row')} that cannot be used"]
    for first, count in sorted(counts.items(), key=lambda item: -item[1]):
        matched = _ENTRY.fullmatch(first)
        reason = f"{matched['reason']} (first: {matched['where']})" if matched else first
        lines.append(f"{count:,} × {reason}")
    return "\n  ".join(lines)


def _kind_of(entry: str) -> str:
    matched = _ENTRY.fullmatch(entry)
    return _without_numbers(matched["reason"] if matched else entry)


def _without_numbers(reason: str) -> str:
    return _NUMBER.sub(lambda number: number[1] or f"N{number[2] or ''}", reason)
