"""What the first step must show of switches that share something out. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rapidformer_templates.planning.switch import Measured

PADDING = 128
"""Elements a worker that an engine may add to its share."""


def data_parallel(measured: Measured) -> int:
    """All workers that have copies of the model, or a share of one."""
    return measured.plan.sizes.copies


def shared_out(
    *, whole_at_borders: bool = False, among: Callable[[Measured], int] = data_parallel, **quantities: str
) -> Callable[[Measured], str | None]:
    """The workers of a replica's copies share these among themselves: measurement → what it counts the elements of.

    Args:
        whole_at_borders: a parameter that lies on the border of two shares is held whole by both workers.
        among: how many workers have one share each.
    """

    def acted(measured: Measured) -> str | None:
        borders = (among(measured) - 1) * whole_at_borders
        twice = borders * (measured["largest_parameter"] or 0)
        findings = (_even(measured, among(measured), name, what, twice) for name, what in quantities.items())
        return next((finding for finding in findings if finding), None)

    return acted


def _even(measured: Measured, shares: int, name: str, what: str, twice: int) -> str | None:
    """``twice``: elements that several workers may hold all the same."""
    copies, held, whole = measured.plan.sizes.copies, measured.all(name), sum(measured.all("trained_elements"))
    # An even share each is all of it once; half of the way to whole copies is no rounding any more.
    expected = min(whole / shares + twice, whole)
    if shares == 1 or (held and sum(held) <= (expected + whole) / 2 + PADDING * len(held)):
        return None
    counts = ", ".join(f"{count:,}" for count in held) or "nothing"
    return (
        f"{shares} shares of the {what}, {whole // copies:,} elements in all, were expected; the workers have {counts}"
    )


def divides_parameters(measured: Measured) -> str | None:
    """Some worker has only a part of some parameter."""
    if measured.plan.sizes.copies == 1 or any(measured.all("divided_elements")):
        return None
    return "parameters of which a worker has only a part were expected; every worker has them whole"


def all_of(*checks: Callable[[Measured], str | None]) -> Callable[[Measured], str | None]:
    """The first of these that finds something."""

    def acted(measured: Measured) -> str | None:
        return next((sentence for check in checks if (sentence := check(measured))), None)

    return acted


def shown(value: Any) -> str:
    """A measurement in a sentence."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
