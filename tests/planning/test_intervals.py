"""Which intervals are allowed, and when a multiple of one has been passed."""

from __future__ import annotations

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.intervals import Interval
from tests.support.requests import config_of


@pytest.mark.parametrize(
    ("text", "size", "unit", "written"),
    [
        ("500", 500, "steps", "500"),
        (500, 500, "steps", "500"),
        ("500 steps", 500, "steps", "500"),
        ("20_000samples", 20000, "samples", "20000samples"),
        ("5e7tokens", 5e7, "tokens", "50000000tokens"),
        ("1token", 1, "tokens", "1tokens"),
        ("30min", 30, "minutes", "30minutes"),
        ("0.5 Minutes", 0.5, "minutes", "0.5minutes"),
    ],
)
def test_what_it_is(text: object, size: float, unit: str, written: str) -> None:
    interval = Interval(text)
    assert (interval.size, interval.unit, str(interval)) == (size, unit, written)
    assert Interval(interval) == interval


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "0.5samples", "5hours", "minutes", "1e", "ten"])
def test_what_it_is_not(text: str) -> None:
    with pytest.raises(ValueError, match="a number of steps, or one with its unit"):
        Interval(text)


def test_a_flag_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"--save-interval needs a number of steps, or .* 30minutes, not '3hours'"):
        config_of("--save-interval 3hours")


def test_multiples() -> None:
    every = Interval("20samples")
    assert [done for done in range(8, 97, 8) if every.passed(done - 8, done)] == [24, 40, 64, 80]
    assert not every.passed(20, 20)
