"""Checks that the first step shows what a sharding switch promises. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable

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
        shares, whole = among(measured), sum(measured.all("trained_elements"))
        on_two_workers = (shares - 1) * (measured["largest_parameter"] or 0) if whole_at_borders else 0
        # Even shares add up to one whole copy. A sum more than halfway from there to whole copies on all workers
        # cannot come from rounding.
        expected = min(whole / shares + on_two_workers, whole)
        for name, what in quantities.items():
            numbers = measured.all(name)
            if shares > 1 and not (numbers and sum(numbers) <= (expected + whole) / 2 + PADDING * len(numbers)):
                counts = ", ".join(f"{count:,}" for count in numbers) or "nothing"
                elements = f"{whole // measured.plan.sizes.copies:,} elements in all"
                return f"{shares} shares of the {what}, {elements}, were expected; the workers have {counts}"
        return None

    return acted


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


def shown(value: object) -> str:
    """Format a measurement for a message."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
