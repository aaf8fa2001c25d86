"""SIGTERM and SIGINT as requests to save and end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rapidformer_templates.errors import Interrupted


class StopRequest:
    """Whether somebody asked the run to end.

    Before the loop starts there is nothing to save, and the request ends the run at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.in_loop = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.in_loop:
            raise Interrupted("asked to end before the first step; nothing was lost", hint="start it again")
        self.asked = True

    @contextmanager
    def loop(self) -> Iterator[StopRequest]:
        """In the body a request is kept until the loop looks at it."""
        self.in_loop = True
        try:
            yield self
        finally:
            self.in_loop = False


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handle SIGTERM and SIGINT in the body (in the main thread; elsewhere Python allows no handlers)."""
    request = StopRequest()
    with _handled(request):
        yield request


@contextmanager
def interruptible(message: str, hint: str) -> Iterator[None]:
    """End the body with :class:`Interrupted` at SIGTERM and SIGINT (in the main thread)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(message, hint=hint)

    with _handled(interrupt):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, handler)
    except ValueError:
        previous = {}  # not the main thread: whoever owns the process owns its signals
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
