"""Fits of rates and factors to measured seconds. The sum of the squared relative errors is smallest."""

from __future__ import annotations

from collections.abc import Sequence


def fit_parts(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the factors, at least 0, of two parts of measured seconds whose sum is closest to the measurements.

    Args:
        parts: both parts of each measurement, divided by the measured seconds.
    """
    first, second = (sum(x) for x in zip(*parts, strict=True))
    a, b, c = (sum(x[i] * x[j] for x in parts) for i, j in ((0, 0), (0, 1), (1, 1)))
    determinant = a * c - b * b
    if determinant > 1e-9 * a * c:
        factors = (first * c - second * b) / determinant, (second * a - first * b) / determinant
        if min(factors) >= 0:
            return factors
    alone = [(first / a if a else 0.0, 0.0), (0.0, second / c if c else 0.0)]
    return min(alone, key=lambda pair: sum((pair[0] * x + pair[1] * y - 1) ** 2 for x, y in parts))


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the delay, at least 0, and the seconds per unit that fit pairs of an amount and its seconds."""
    delay, per_unit = fit_parts([(1 / seconds, amount / seconds) for amount, seconds in points])
    if per_unit > 0:
        return delay, per_unit
    slopes = [amount / seconds for amount, seconds in points]  # faster if it is larger: there is no such delay
    return 0.0, sum(slopes) / sum(slope * slope for slope in slopes)
