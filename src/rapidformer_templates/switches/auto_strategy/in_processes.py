"""Tasks in processes of their own, for what Python itself computes and would keep one core busy with."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def in_forks(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, all of them at work at the same time.

    A task sees everything that is in memory here, and what it changes there is lost. What does not come to its end
    is left out, with its error: whoever needs it meets that error again. Nothing is done where there is one task
    only, or where forking is not safe (macOS) or not possible.
    """
    if len(tasks) < 2 or sys.platform != "linux":
        return []
    context = multiprocessing.get_context("fork")
    gc.freeze()  # else its collections would write to, and so copy, all that the processes share
    under_way = []
    for task in tasks:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(task, theirs), daemon=True)
        process.start()
        theirs.close()
        under_way.append((process, ours))
    returned = []
    for process, pipe in under_way:
        with contextlib.suppress(EOFError):
            returned.append(pipe.recv())
        process.join()
    return returned


def _tell(task: Callable[[], Any], pipe: Connection) -> None:
    with contextlib.suppress(Exception), pipe:
        pipe.send(task())
