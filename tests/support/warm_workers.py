"""Groups of workers that stay, for many short runs: a group that hangs or dies is ended and a new one started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from rapidformer_templates.system.ports import free_port
from rapidformer_templates.system.workers import join
from tests.support.warm_processes import become_worker, warm
from tests.support.worker_group import WITHOUT_PICTURES

PATIENCE = 5.0
"""Seconds that the others of a group get when one of them has failed."""


@dataclass
class Failure:
    """How a worker's task ended, if it did not return."""

    kind: str
    text: str


@dataclass
class WarmWorkers:
    """``count`` workers that meet once; one worker alone needs no process of its own.

    Attributes:
        limit: seconds that a task may take.
    """

    count: int
    limit: float = 120.0
    _processes: list[Any] = field(default_factory=list)
    _ends: list[Connection] = field(default_factory=list)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(*arguments)`` in each worker; results by rank, a :class:`Failure` where there is none."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function, arguments))
        results: list[Any] = [None] * self.count
        waiting, deadline = set(range(self.count)), time.monotonic() + self.limit
        while waiting and time.monotonic() < deadline:
            for rank in [rank for rank in waiting if self._ends[rank].poll(0.02)]:
                try:
                    results[rank] = self._ends[rank].recv()
                except EOFError:
                    results[rank] = Failure("EOFError", "the worker has died")
                waiting.discard(rank)
                if isinstance(results[rank], Failure):
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        for rank in waiting:
            results[rank] = Failure("TimeoutError", "the worker did not come back")
        # Workers that all came back with the same error are in step; of others one may wait in an exchange.
        ends = {result.kind if isinstance(result, Failure) else "" for result in results}
        if len(ends) > 1 or ends & {"EOFError", "TimeoutError"}:
            self.end()
        return results

    def _start(self) -> None:
        context, port = warm(), free_port()
        for rank in range(self.count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.count, port, dict(os.environ), there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._ends.append(here)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []


def _serve(rank: int, count: int, port: int, environment: dict[str, str], end: Connection) -> None:
    """Carry out one task after another."""
    become_worker(rank, count, port, environment)
    # These workers are a group already; the launcher's own care for errors is not wanted.
    with WITHOUT_PICTURES, join("cpu"), mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        while True:
            try:
                function, arguments = end.recv()
            except EOFError:
                return
            end.send(outcome(function, *arguments))


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a task returns, or how it failed."""
    try:
        return function(*arguments)
    except BaseException as error:
        return Failure(type(error).__name__, str(error))
