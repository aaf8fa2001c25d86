"""Fixtures that give every test the same state at its start. :mod:`tests.conftest` registers them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
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

WORKER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _forget_worker() -> None:
    for name in WORKER:
        os.environ.pop(name, None)


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
