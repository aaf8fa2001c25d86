"""Fixtures and hooks of the whole suite: which tests share a process, and the state in which every test starts."""

import gc
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rapidformer_templates.switches.auto_strategy import results
from tests.support import parity
from tests.support.worker_pool import (
    FAST_RUNS,
    FSYNC,
    WITHOUT_PICTURES,
    WITHOUT_RETRIES,
    end_fork_server,
    end_pool,
    leave_group,
)

ROOT = Path(__file__).parents[1]

pytest_plugins = (
    "tests.support.durations",
    "tests.support.messages",
    "tests.support.options",
    "tests.support.texts",
    "tests.support.indexed_sets",
    "tests.support.hub_server",
)
"""Fixtures for all folders."""

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

WORKER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _forget_worker() -> None:
    for name in WORKER:
        os.environ.pop(name, None)


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


@pytest.fixture(autouse=True, scope="module")
def has_no_group() -> None:
    """Close the process group that an engine without peers opens. It would stay open as long as the process lives."""
    leave_group()


@pytest.fixture(autouse=True, scope="module")
def has_no_idle_workers(request: pytest.FixtureRequest) -> None:
    """End the workers of earlier modules if this one starts none. They would take memory until the end."""
    items = [item for item in request.session.items if item.path == request.path]
    starts = {name for name in ("distributed", "accelerator") if any(item.get_closest_marker(name) for item in items)}
    if not starts:
        end_pool()
    if "accelerator" not in starts:
        end_fork_server()


@pytest.fixture(autouse=True, scope="session")
def programs_start_without_idle_workers() -> Iterator[None]:
    """End idle workers before this process starts a Python program, which may start workers as well."""
    start, here = subprocess.Popen.__init__, os.getpid()

    def end_and_start(program: Any, arguments: Any, *more: Any, **options: Any) -> None:
        if os.getpid() == here and isinstance(arguments, (list, tuple)) and arguments[0] == sys.executable:
            end_pool()
        start(program, arguments, *more, **options)

    with mock.patch.object(subprocess.Popen, "__init__", end_and_start):
        yield


@pytest.fixture(autouse=True)
def is_no_worker() -> Iterator[None]:
    """Remove the environment variables that accelerate, which other trainers use, has set."""
    _forget_worker()
    yield
    _forget_worker()


@pytest.fixture(autouse=True)
def searches_are_not_stored(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test its own cache of searches, which no other test and no user has filled."""
    folder = tmp_path_factory.getbasetemp() / f"searches-{uuid.uuid4().hex}"
    monkeypatch.setattr(results, "cache_folder", lambda: folder)


@pytest.fixture(autouse=True, scope="session")
def references_are_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share one folder for :func:`tests.support.parity.reference` between all test processes of a session."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "references"
    folder.mkdir(exist_ok=True)
    os.environ[parity.FOLDER] = str(folder)


@pytest.fixture(autouse=True, scope="session")
def runs_are_fast() -> Iterator[None]:
    """Make runs in this process draw no pictures and not wait for the disk. The marker ``durable`` makes them wait."""
    with FAST_RUNS, WITHOUT_PICTURES, WITHOUT_RETRIES:
        yield
    end_pool()


@pytest.fixture(autouse=True)
def waits_for_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give tests about crashes, files and power loss the real ``fsync``."""
    if request.node.get_closest_marker("durable"):
        with mock.patch("os.fsync", FSYNC):
            yield
    else:
        yield


@pytest.fixture(autouse=True, scope="module")
def deepspeed_parts(request: pytest.FixtureRequest) -> None:
    """Build DeepSpeed's compiled parts before the workers of a module start, as a launch does."""
    if any(request.node.get_closest_marker(name) is None for name in ("deepspeed", "distributed")):
        return
    from rapidformer_templates.switches.zero.compiled_parts import PartError, build

    try:
        build(["cpu_adam"], "cpu")
    except PartError as error:
        pytest.skip(error.render())
