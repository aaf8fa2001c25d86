"""Run tasks in separate processes, for Python work that would keep only one core busy."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def in_forks(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks in parallel in forked processes and return their results.

    A task sees everything in this process's memory, and its changes are lost. The result of a task that fails is left
    out, and its error is not raised here: code that needs the result meets the error again. The list is empty if there
    is only one task, or if forking is unsafe (macOS) or impossible.
    """
    if len(tasks) < 2 or sys.platform != "linux":
        return []
    context = multiprocessing.get_context("fork")
    gc.freeze()  # otherwise, garbage collection would write to all shared memory and so copy it
    under_way = []
    for task in tasks:
        own_end, child_end = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(task, child_end), daemon=True)
        process.start()
        child_end.close()
        under_way.append((process, own_end))
    returned = []
    for process, pipe in under_way:
        with contextlib.suppress(EOFError):
            returned.append(pipe.recv())
        process.join()
    return returned


def _tell(task: Callable[[], object], pipe: Connection) -> None:
    with contextlib.suppress(Exception), pipe:
        pipe.send(task())
