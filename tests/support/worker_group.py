"""Start a group of gloo workers once and run a function in each of them."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp

from rapidformer_templates.system.ports import free_port
from rapidformer_templates.system.workers import Workers, join
from tests.support import stand_in
from tests.support.warm_processes import METHOD, become_worker, warm

WITHOUT_PICTURES = mock.patch("rapidformer_templates.run.console.draw_curves")
"""Half of the time of runs as short as those of tests; what starts a command of its own still draws them."""


def run_in_workers(count: int, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """``function(workers, *arguments)`` in ``count`` processes; their results by rank.

    An exception in one of them is raised here with its stack trace.

    Args:
        device: what they compute on, each on one of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_workers(count, folder, function, *arguments, device=device)
        while not context.join():
            pass
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(count)]


def start_workers(count: int, folder: str, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> Any:
    """The same without waiting for their ends; each leaves its result in ``folder``."""
    warm()
    details = (count, free_port(), folder, dict(os.environ), device, function, arguments)
    return mp.start_processes(_worker, details, nprocs=count, join=False, start_method=METHOD)


def _worker(
    rank: int,
    count: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    device: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    become_worker(rank, count, port, environment)
    if device == stand_in.NAME:
        stand_in.load()
    with WITHOUT_PICTURES, join(device) as workers:
        result = function(workers, *arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))


def why_no_nvme() -> str | None:
    """Why NVMe offload is not tested here: its compiled part takes minutes to build, which no test should."""
    from rapidformer_templates.switches.zero.build_tools import problems
    from rapidformer_templates.switches.zero.compiled_parts import folder, is_built

    found = problems("async_io")
    if found or not is_built("async_io", folder("cpu")):
        return found or "DeepSpeed's async_io is not built: rapidformer doctor --build async_io"
    return None


def alone() -> Workers:
    """The only worker of a run without a group."""
    return Workers(0, 0, 1, torch.device("cpu"))
