"""Options of a run of the tests: end it in time, and fail tests that are skipped because a package is missing."""

import re
import time
from typing import Any

import pytest

MISSING = re.compile(r"pip install|could not import|not installed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deadline", type=float, default=float("inf"), help="begin no test after this time (date +%%s)")
    parser.addoption("--complete", action="store_true", help="fail if a test is skipped for a missing package")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("deadline"):
        pytest.skip("the time of this run is over (--deadline)")


def _failed(report: Any, config: pytest.Config) -> Any:
    if config.getoption("complete") and report.skipped and MISSING.search(str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"skipped for a missing package: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    return _failed((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    return _failed((yield), collector.config)
