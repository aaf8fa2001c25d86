"""Handles SIGTERM, SIGINT and SIGHUP as requests to save and end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rapidformer_templates.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]

ASKING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals from a scheduler, from Ctrl-C, and from a terminal that is closed."""

INSISTS_AFTER = 1.0
"""Seconds. An earlier signal is the same request, sent to both the process and its group, or by shell and terminal."""


class StopSignal:
    """Records the signals that asked a process to end."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.is_repeated = False
        self._first = 0.0
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGHUP", None):
            for fd in self._terminals:  # writing to a closed terminal would raise an error
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), fd)
        now = time.monotonic()
        if not self.signals:
            self._first = now
        elif number in (signal.SIGTERM, signal.SIGINT) and now - self._first >= INSISTS_AFTER:
            self.is_repeated = True
        self.signals.append(number)


class StopRequest:
    """A request to end the run.

    Outside of the loop there is nothing left to save, so the request ends the run at once. Inside the loop a second
    request, such as a second Ctrl-C, means: do not wait for the save.

    Args:
        resumes: whether there is a checkpoint from which the same command would resume.
        alone: there is no launcher for this process, so a second request must end it here.
    """

    def __init__(self, resumes: Callable[[], bool] = lambda: False, *, alone: bool = True) -> None:
        self._signal = StopSignal()
        self._resumes = resumes
        self._alone = alone
        self._in_loop = self._raised = False
        self._saves: bool | None = None  # after the loop: whether it has saved its work

    @property
    def is_requested(self) -> bool:
        return bool(self._signal.signals)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._signal(number, frame)
        if self._signal.is_repeated and self._alone:
            os.write(2, b"stopped at once, as requested twice\n")  # print is not safe here because it may be running
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self._in_loop and not self._raised:
            self._raised = True  # only once, because a second exception would interrupt the cleanup
            raise self._outside_the_loop()

    @contextmanager
    def loop(self, *, saves: bool) -> Iterator[StopRequest]:
        """Inside the context, store a request until the loop checks for it.

        Args:
            saves: whether the code inside leaves a checkpoint.
        """
        self._in_loop = True
        try:
            yield self
            self._saves = saves
        finally:
            self._in_loop = False

    def _outside_the_loop(self) -> Interrupted:
        if self._saves is None:
            message = "stopped before the first step; nothing was lost"
            return Interrupted(message, hint="start it again", saved=self._resumes())
        message = "stopped after the last step, before evaluation and export were done"
        if self._saves:
            return Interrupted(message, hint="every step is saved: --resume does the rest")
        return Interrupted(message, hint="nothing was saved: there is no --save", saved=False)


@contextmanager
def stop_request(resumes: Callable[[], bool] = lambda: False, *, alone: bool = True) -> Iterator[StopRequest]:
    """Handle requests to end inside the context. Only in the main thread, because Python requires it."""
    request = StopRequest(resumes, alone=alone)
    with _handled(request):
        yield request


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Record requests to end inside the context (in the main thread)."""
    stop = StopSignal()
    with _handled(stop):
        yield stop


@contextmanager
def interruptible(message: str, hint: str) -> Iterator[None]:
    """Raise :class:`Interrupted` inside the context on a request to end (in the main thread)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(message, hint=hint)

    with _handled(interrupt):
        yield


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    previous = {}
    try:
        for number in ASKING:
            if number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            previous[number] = signal.signal(number, handler)
    except ValueError:
        previous = {}  # not the main thread: the owner of the process handles its signals
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
