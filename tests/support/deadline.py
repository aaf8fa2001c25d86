"""End a run of the tests in time: ``--deadline SECONDS`` skips the tests that have not begun by then.

The time is in seconds since 1970, as ``date +%s`` prints it.
"""

from __future__ import annotations

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deadline", type=float, default=float("inf"), help="begin no test after this time (date +%%s)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("deadline"):
        pytest.skip("the time of this run is over (--deadline)")
