"""What every test stands on."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.warm_workers import WarmWorkers
from tests.support.worker_group import WITHOUT_PICTURES

pytest_plugins = ("tests.support.texts", "tests.support.indexed_sets")
"""Fixtures of every room."""

WORKER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _forget_worker() -> None:
    for name in WORKER:
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start workers come first: what takes longest is not what the other process waits for at the end."""
    long = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: full collections of garbage need not go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def has_no_group() -> None:
    """An engine alone opens a process group for itself, which stays open for as long as the process lives."""
    if torch.distributed.is_initialized():
        # DeepSpeed keeps copies of the group, which it forgets only if it is told.
        deepspeed: Any = sys.modules.get("deepspeed.comm.comm")
        told = deepspeed is not None and deepspeed.cdb is not None
        (deepspeed if told else torch.distributed).destroy_process_group()


@pytest.fixture(autouse=True)
def is_no_worker() -> Iterator[None]:
    """This process is no worker, whatever accelerate, which peers of ours use, writes into its environment."""
    _forget_worker()
    yield
    _forget_worker()


@pytest.fixture(autouse=True, scope="session")
def draws_no_pictures() -> Iterator[None]:
    """Of runs in this process."""
    with WITHOUT_PICTURES:
        yield


@pytest.fixture(autouse=True, scope="module")
def deepspeed_parts(request: pytest.FixtureRequest) -> None:
    """Built before the workers of a module start, as a launch does it; of several test processes one builds."""
    if any(request.node.get_closest_marker(name) is None for name in ("deepspeed", "distributed")):
        return
    from rapidformer_templates.switches.zero.compiled_parts import PartError, build

    try:
        build(["cpu_adam"], "cpu")
    except PartError as error:
        pytest.skip(error.render())


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, WarmWorkers]]:
    """Workers for runs of a second: groups of two and of four, which start when they are first asked."""
    groups = {count: WarmWorkers(count) for count in (2, 4)}
    yield groups
    for group in groups.values():
        group.end()
