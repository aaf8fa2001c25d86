"""Hooks of the whole suite: which tests run, which of them share a process, and which modules have fixtures."""

import gc
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

pytest_plugins = ("tests.support.durations", "tests.support.messages", "tests.support.options")
"""Modules with options of the command line."""

FIXTURES = ("texts", "indexed_sets", "hub_server", "state")
"""Modules of ``tests.support`` with fixtures for all folders."""

TWO_AT_MOST = (
    "tests/benchmarks/",
    "tests/docs/",
    "tests/rehearsal/",
    "tests/system/",
    "tests/commands/test_demo.py",
    "tests/engines/test_shards.py",
    "tests/run/test_inference.py",
    "tests/run/test_out_of_memory.py",
    "tests/switches/test_other_package.py",
)
"""Test files that start at most two workers, although their text does not say so: see :func:`_drives_four`."""

GROUPS = re.compile(r"(?:in_workers|observed|start_workers)\(\s*([^,)]+),")
"""The number of workers in a call that starts a group of them."""

MORE = re.compile(r"nproc-per-node[\"', =]+[3-9]")
"""A command that starts more than two workers."""

LONGER = (
    "tests/benchmarks/",
    "tests/docs/test_examples.py",
    "tests/docs/test_pages_in_order.py",
    "tests/docs/test_site.py",
    "tests/rehearsal/",
    "tests/scripts/",
)
"""The site, the walk through the manual, the stand-in device, and the benchmarks and scripts of a checkout.

``make test-longer`` runs them, ``make test`` does not.
"""


@cache
def _starts_workers(path: Path) -> bool:
    source = path.read_text(encoding="utf-8")
    return "mark.distributed" in source or "mark.accelerator" in source


@cache
def _drives_four(path: Path) -> bool:
    """Whether a file may have tests that start four workers.

    The other files run in the test process without the tests of four workers. That process must have more to do than
    this one, which runs the last of these files when its own are done.
    """
    if not _starts_workers(path) or path.relative_to(ROOT).as_posix().startswith(TWO_AT_MOST):
        return False
    source = path.read_text(encoding="utf-8")
    counts = GROUPS.findall(source)
    return not counts or bool(MORE.search(source)) or not set(counts) <= {"1", "2"}


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, and torch with them, but not in the process that only gives others their tests."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        for module in FIXTURES:
            config.pluginmanager.import_plugin(f"tests.support.{module}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files that may start four workers to one test process, so that two never do so at the same time.

    The other test process runs the rest, file by file.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneDrivesWorkers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "workers" if _drives_four(config.rootpath / file) else file

    return OneDrivesWorkers(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs later. Start with the tests that start four workers, because they take longest.

    Then come other tests that start workers. A file without any ends the pool, and the next one would start it anew.
    """
    for item in items:
        later = item.path.relative_to(ROOT).as_posix().startswith(LONGER)
        if later and not item.get_closest_marker("exhaustive"):
            item.add_marker("longer")
    items.sort(key=lambda item: (not _drives_four(item.path), not _starts_workers(item.path)))


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and none of what is imported and collected, because it stays until the end.

    Workers are forked from this process. With Python's thresholds, a tenth of their processor time is spent on it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
