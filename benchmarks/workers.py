"""One way to start what a benchmark compares: loops that take turns, and functions in new processes.

A training loop (``Trainer.fit``) cannot be split into steps. So each loop sleeps in its callback at the end of a step
until it is its turn again. A loop runs in a thread, or in one process or several workers that are forked from a process
that has imported its module.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system import launch

Clock = Callable[[], float]


class Closed(BaseException):
    """Raised inside a loop to end it. It is not an ``Exception``, because a loop must not treat it as a failed step."""


class Ended(RuntimeError):
    """A loop ended during a turn. ``results`` has the value that each worker returned."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__("the loop ended early")
        self.results = results


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

    def __call__(self, loss: Any = float("nan")) -> None:
        """End a step. The benchmark gets the loss of the last step of a turn."""
        self._left -= 1
        if self._left == 0 and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = self._clock()
        self.seconds += now - self._mark
        self._mark = now
        if self._left == 0:
            self._line.send((self.seconds, float(loss)))
            self.wait()

    def begin(self) -> None:
        """Start the clock here. The time before it is a separate turn, which does not count."""
        self.seconds = 0.0
        self._line.send((self.seconds, float("nan")))
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
        body: The loop. It receives its callback and the arguments, and returns a result.
        workers: Number of processes, which are workers of one run without output. With 0 it runs in a thread.
        clock: See :class:`StepDone`.

    Attributes:
        loss: Mean over the workers of the loss at the end of the last turn.
    """

    def __init__(
        self, body: Callable[..., Any], *arguments: Any, workers: int = 0, clock: Clock = time.perf_counter
    ) -> None:
        self.loss = float("nan")
        self._seconds = 0.0
        self._name = getattr(body, "__qualname__", repr(body))
        self._stack = ExitStack()
        self._lines: list[Connection] = []
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([each.__module__ for each in (body, *arguments) if hasattr(each, "__module__")])
        port = self._stack.enter_context(launch.reserved_port())
        for rank in range(max(1, workers)):
            line, theirs = multiprocessing.Pipe()
            self._lines.append(line)
            if workers:
                environment = _environment(rank, workers, port) if workers > 1 else {}
                process = context.Process(target=_apart, args=(environment, theirs, body, arguments, clock))
                process.start()
                theirs.close()
                self._stack.callback(process.kill)
                self._stack.callback(process.join, 10)
            else:
                thread = threading.Thread(target=_live, args=(theirs, body, arguments, clock), daemon=True)
                thread.start()
                self._stack.callback(thread.join, 10)

    def advance(self, steps: int) -> float:
        """Run some optimizer steps and return the seconds of the slowest worker. The first call also sets up the loop.

        Raises:
            RapidformerError: The loop failed.
            Ended: The loop ended.
        """
        answers: dict[Any, Any] = {}
        try:
            for line in self._lines:
                line.send(steps)
            while len(answers) < len(self._lines):
                for ready in multiprocessing.connection.wait([line for line in self._lines if line not in answers]):
                    assert isinstance(ready, Connection)
                    answers[ready] = ready.recv()
                    if isinstance(answers[ready], Exception):
                        raise answers[ready]
        except (EOFError, OSError):
            raise RapidformerError("the loop's process ended", where=self._name) from None
        told = [answers[line] for line in self._lines]
        if isinstance(told[0], _Result):
            raise Ended([result.value for result in told])
        before, self._seconds = self._seconds, max(seconds for seconds, _ in told)
        self.loss = statistics.mean(loss for _, loss in told)
        return self._seconds - before

    def finish(self) -> list[Any]:
        """Let the loop finish, and return the result of each worker."""
        try:
            while True:
                self.advance(1 << 62)
        except Ended as end:
            return end.results

    def close(self) -> None:
        """End the loop immediately."""
        for line in self._lines:
            line.close()
        self._stack.close()


def run_in_workers(function: Callable[..., Any], *arguments: Any, workers: int = 1) -> list[Any]:
    """Call a function in new processes, and return their results by rank.

    Raises:
        RapidformerError: one of them failed. The others are ended.
    """
    with contextlib.closing(Loop(_once, function, arguments, workers=workers)) as loop:
        return loop.finish()


def _once(step_done: StepDone, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return function(*arguments)


class _Result:
    def __init__(self, value: Any) -> None:
        self.value = value


def _environment(rank: int, workers: int, port: int) -> dict[str, str]:
    count, own, loopback = str(workers), str(rank), {launch.INTERFACE: "lo", launch.CHECKED: "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, **address, **loopback}


def _live(line: Connection, body: Callable[..., Any], arguments: tuple[Any, ...], clock: Clock) -> None:
    step_done = StepDone(line, clock)
    try:
        step_done.wait()
        answer: object = _Result(body(step_done, *arguments))
    except Closed:
        return
    except RapidformerError as error:
        answer = RapidformerError(error.render())
    except Exception:
        answer = RapidformerError(traceback.format_exc()[-2000:])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the result any more
        line.send(answer)


def _apart(
    environment: dict[str, str], line: Connection, body: Callable[..., Any], arguments: tuple[Any, ...], clock: Clock
) -> None:
    os.environ.update(environment)
    if environment:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(environment["WORLD_SIZE"])))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        _live(line, body, arguments, clock)
