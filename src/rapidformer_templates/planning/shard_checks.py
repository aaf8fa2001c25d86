"""Checks that the first step shows what a sharding switch promises. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rapidformer_templates.planning.switch import Measured

PADDING = 128
"""Number of elements per worker that an engine may add to its share as padding."""


def data_parallel(measured: Measured) -> int:
    """Return the number of workers that have copies of the model, or a share of one."""
    return measured.plan.sizes.copies


def check_even_shards(
    *, whole_at_borders: bool = False, among: Callable[[Measured], int] = data_parallel, **quantities: str
) -> Callable[[Measured], str | None]:
    """Build a check that each named measurement is split evenly over the copies of a replica.

    ``quantities`` maps a measurement to the name of what it counts the elements of.

    Args:
        whole_at_borders: whether two workers hold a parameter whole if it is on the border between their shares.
        among: returns the number of workers that have one share each.
    """

    def acted(measured: Measured) -> str | None:
        borders = (among(measured) - 1) * whole_at_borders
        twice = borders * (measured["largest_parameter"] or 0)
        findings = (_check_even(measured, among(measured), name, what, twice) for name, what in quantities.items())
        return next((finding for finding in findings if finding), None)

    return acted


def _check_even(measured: Measured, shares: int, name: str, what: str, twice: int) -> str | None:
    """Check one measurement. ``twice`` is the number of elements that several workers may hold at the same time."""
    copies, numbers, whole = measured.plan.sizes.copies, measured.all(name), sum(measured.all("trained_elements"))
    # Even shares add up to one whole copy. A sum more than halfway from there to whole copies on all workers cannot
    # come from rounding.
    expected = min(whole / shares + twice, whole)
    if shares == 1 or (numbers and sum(numbers) <= (expected + whole) / 2 + PADDING * len(numbers)):
        return None
    counts = ", ".join(f"{count:,}" for count in numbers) or "nothing"
    return (
        f"{shares} shares of the {what}, {whole // copies:,} elements in all, were expected; the workers have {counts}"
    )


def divides_parameters(measured: Measured) -> str | None:
    """Check that some worker has only a part of a parameter."""
    if measured.plan.sizes.copies == 1 or any(measured.all("divided_elements")):
        return None
    return "parameters sharded over the workers were expected; every worker has whole parameters"


def first_finding(*checks: Callable[[Measured], str | None]) -> Callable[[Measured], str | None]:
    """Combine checks: return the first finding."""

    def acted(measured: Measured) -> str | None:
        return next((sentence for check in checks if (sentence := check(measured))), None)

    return acted


def shown(value: Any) -> str:
    """Format a measurement for a message."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
