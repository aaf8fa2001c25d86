"""Training loops that take turns, so that all of them see the same moments of a busy machine.

A loop that cannot be taken apart (``Trainer.fit``) still calls back after each step. Each loop gets
a thread of its own that sleeps in this callback until it is its turn again; never do two run at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

StepDone = Callable[[], None]
"""What a loop must call at the end of each optimizer step."""

Loop = Callable[[StepDone], None]
"""A training loop; it runs until :class:`Closed` is raised in its callback."""


class Closed(BaseException):
    """Raised inside a loop to end it. Not an ``Exception``: no loop may take it for a failed step."""


class PausedLoop:
    """A loop that runs a number of steps at a time."""

    def __init__(self, loop: Loop) -> None:
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._may_run = threading.Semaphore(0)
        self._has_paused = threading.Semaphore(0)
        self._steps_left = 0
        self._began = 0.0
        self._seconds = 0.0
        self._closing = False
        self._error: Exception | None = None

    def advance(self, steps: int) -> float:
        """Run ``steps`` optimizer steps; the seconds that they took.

        They reach from callback to callback, so everything that the loop does between steps counts
        and the change of threads does not. The first call also sets the loop up: its time means nothing.
        """
        self._steps_left = steps
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.release()
        self._has_paused.acquire()
        if self._error is not None:
            raise self._error
        return self._seconds

    def close(self) -> None:
        """End the loop where it stands."""
        if self._thread.is_alive():
            self._closing = True
            self._may_run.release()
            self._thread.join()

    def _run(self, loop: Loop) -> None:
        try:
            self._wait()
            loop(self._step_done)
            raise RuntimeError("the loop ended by itself")
        except Closed:
            return
        except Exception as error:
            self._error = error
        self._has_paused.release()

    def _step_done(self) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._seconds = time.perf_counter() - self._began
            self._has_paused.release()
            self._wait()

    def _wait(self) -> None:
        self._may_run.acquire()
        if self._closing:
            raise Closed
        self._began = time.perf_counter()
