"""Training loops that take turns, although they cannot be split into steps (``Trainer.fit``).

Each loop sleeps in its callback at the end of a step until it is its turn again. Two loops never run at the same time.
A loop runs in a thread or in a separate process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rapidformer_templates.errors import RapidformerError

Clock = Callable[[], float]


class Closed(BaseException):
    """Raised inside a loop to end it. It is not an ``Exception``, because a loop must not treat it as a failed step."""


class Ended(RuntimeError):
    """A loop ended during a turn. ``result`` is the value that it returned."""

    def __init__(self, result: Any) -> None:
        super().__init__("the loop ended early")
        self.result = result


class StepDone:
    """The callback that a loop must call at the end of each optimizer step.

    Args:
        clock: Returns seconds. The default is the time of the clock on the wall.

    Attributes:
        seconds: Seconds from callback to callback. They include all that the loop does between its steps, but not
            the turns of others.
    """

    def __init__(self, line: Connection, clock: Clock = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._line = line
        self._left = 0
        self._mark = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the step that is about to end is the last one of its turn."""
        return self._left == 1

    def __call__(self) -> None:
        now = self._clock()
        self.seconds += now - self._mark
        self._mark = now
        self._left -= 1
        if self._left == 0:
            self._line.send(self.seconds)
            self.wait()

    def begin(self) -> None:
        """Start the clock here. The time before it is a separate turn, which does not count."""
        self.seconds = 0.0
        self._line.send(self.seconds)
        self.wait()

    def wait(self) -> None:
        """Sleep until it is this loop's turn."""
        try:
            self._left = self._line.recv()
        except EOFError:
            raise Closed from None
        self._mark = self._clock()


class Loop:
    """A loop that runs a number of steps at a time.

    Args:
        body: The loop. It receives its callback and the arguments.
        process: Whether the loop runs in a separate process, without output.
        clock: See :class:`StepDone`.
    """

    def __init__(
        self, body: Callable[..., Any], *arguments: Any, process: bool = False, clock: Clock = time.perf_counter
    ) -> None:
        self._line, theirs = multiprocessing.Pipe()
        self._seconds = 0.0
        self._name = getattr(body, "__qualname__", repr(body))
        if process:
            work = multiprocessing.get_context("spawn").Process(
                target=_apart, args=(theirs, body, arguments, clock), daemon=True
            )
            work.start()
            theirs.close()
            self._join: Callable[[float], None] = work.join
            self._kill = work.kill
        else:
            thread = threading.Thread(target=_live, args=(theirs, body, arguments, clock), daemon=True)
            thread.start()
            self._join, self._kill = thread.join, lambda: None

    def advance(self, steps: int) -> float:
        """Run some optimizer steps and return the seconds that they took. The first call also sets up the loop.

        Raises:
            RapidformerError: The loop failed.
            Ended: The loop ended.
        """
        try:
            self._line.send(steps)
            answer = self._line.recv()
        except (EOFError, OSError):
            raise RapidformerError("the loop's process ended", where=self._name) from None
        if isinstance(answer, Exception):
            raise answer
        spent, self._seconds = answer - self._seconds, answer
        return float(spent)

    def finish(self) -> Any:
        """Let the loop finish, and return its result."""
        try:
            while True:
                self.advance(1 << 62)
        except Ended as end:
            return end.result

    def close(self) -> None:
        """End the loop immediately."""
        self._line.close()
        self._join(10)
        self._kill()


def _live(line: Connection, body: Callable[..., Any], arguments: tuple[Any, ...], clock: Clock) -> None:
    step_done = StepDone(line, clock)
    try:
        step_done.wait()
        answer: Exception = Ended(body(step_done, *arguments))
    except Closed:
        return
    except RapidformerError as error:
        answer = RapidformerError(error.render())
    except Exception:
        answer = RapidformerError(traceback.format_exc()[-2000:])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the result any more
        line.send(answer)


def _apart(line: Connection, body: Callable[..., Any], arguments: tuple[Any, ...], clock: Clock) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        _live(line, body, arguments, clock)
