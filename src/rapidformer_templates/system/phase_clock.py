"""Measures how long a worker is busy in each phase of a training step, without the time in which it waits for peers.

In a synchronous step all workers take the same time, because the fast ones wait for the slow one in a collective. So
wall time does not show which worker is slow. The time outside of collectives does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from rapidformer_templates.system.replaced_functions import patch_function

FORWARD, BACKWARD, UPDATE, EXCHANGE = "forward", "backward", "optimizer update", "exchange of gradients"
"""The phases inside of a step, in which an engine owns the process."""


class PhaseClock:
    """Adds up the seconds of each phase of this worker, and those of them in which it waited for a collective.

    On an accelerator these are seconds of the host. It waits for its device outside of the phases, or in an exchange.

    Args:
        now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._phase, self._since, self._waited = "", now(), 0.0
        self._busy: dict[str, float] = defaultdict(float)
        self._waiting: dict[str, float] = defaultdict(float)

    def enter(self, phase: str) -> None:
        """Note that this worker begins a phase, or continues it."""
        now = self.now()
        self._busy[self._phase] += now - self._since - self._waited
        self._waiting[self._phase] += self._waited
        self._phase, self._since, self._waited = phase, now, 0.0

    def take(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the seconds in which this worker was busy, and those in which it waited, since the last call."""
        self.enter(self._phase)
        seconds = self._busy, self._waiting
        self._busy, self._waiting = defaultdict(float), defaultdict(float)
        return seconds

    @contextmanager
    def counts_waits(self) -> Iterator[None]:
        """Measure how long this thread waits for collectives inside the context.

        ``Work.wait`` is the place in which torch's collectives, FSDP and DeepSpeed wait. DDP waits in C++: its engine
        enters :data:`EXCHANGE` before that. Other threads, such as those of savers, wait without the worker.
        """
        patch_function(dist.Work, "wait", _counted_wait)
        token = _waiting_clock.set(self)
        try:
            yield
        finally:
            _waiting_clock.reset(token)

    def wait(self, call: Callable[..., object], *arguments: object, **keywords: object) -> object:
        """Return the result of a call that waits for peers."""
        began = self.now()
        try:
            return call(*arguments, **keywords)
        finally:
            self._waited += self.now() - began


_waiting_clock: ContextVar[PhaseClock | None] = ContextVar("_waiting_clock", default=None)


def _counted_wait(original: Callable[..., object], *arguments: object, **keywords: object) -> object:
    clock = _waiting_clock.get()
    return clock.wait(original, *arguments, **keywords) if clock else original(*arguments, **keywords)
