"""Fits of measured seconds."""

from __future__ import annotations

import pytest

from rapidformer_templates.commands.bench.least_squares import fit_line, fit_parts

SIZES = (2.0**12, 2.0**16, 2.0**20, 2.0**24)


def test_a_line_recovers_its_delay_and_its_rate() -> None:
    delay, per_byte = fit_line([(size, 3e-5 + size / 2e9) for size in SIZES])
    assert (delay, per_byte) == pytest.approx((3e-5, 1 / 2e9))
    assert fit_line([(size, size / 2e9) for size in SIZES]) == pytest.approx((0.0, 1 / 2e9), abs=1e-12)
    # Errors in either direction move a rate less than the errors themselves.
    noisy = fit_line([(size, (3e-5 + size / 2e9) * (1 + 0.1 * (-1) ** i)) for i, size in enumerate(SIZES)])
    assert noisy == pytest.approx((3e-5, 1 / 2e9), rel=0.2)
    assert fit_line([(1.0, 2.0), (2.0, 1.0)])[0] == 0  # faster if it is larger: there is no such delay


def test_parts_are_fitted_and_never_negative() -> None:
    assert fit_parts([(0.5, 0.25), (0.25, 0.375)]) == pytest.approx((1.0, 2.0))
    assert fit_parts([(0.5, 0.0), (0.5, 0.0)]) == (2.0, 0.0)
    computation, exchanges = fit_parts([(1.0, 0.1), (0.5, 1.0)])
    assert computation > 0
    assert exchanges >= 0
    # The exact solution is (3, -1). The closest one without a negative factor has only the first part.
    assert fit_parts([(0.5, 0.5), (0.75, 1.25)]) == pytest.approx((1.25 / 0.8125, 0.0))
