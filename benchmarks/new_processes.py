"""Run functions in new processes, so that memory that others have used and freed does not change what they measure."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import TypeVar

from rapidformer_templates.errors import RapidformerError

Case = TypeVar("Case")
Result = TypeVar("Result")


def run_in_new_processes(function: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """Call a function with each case, in processes that run at the same time. Returns the results in their order.

    The processes are forked from a server that has imported the module of the function. So they do not wait for
    imports, and imports are not measured.

    Raises:
        RapidformerError: one of them failed. The others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    results: dict[int, Result] = {}
    with ExitStack() as stack:
        numbers: dict[multiprocessing.connection.Connection, int] = {}
        for number, case in enumerate(cases):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_result, args=(function, case, sender))
            process.start()
            sender.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            numbers[stack.enter_context(receiver)] = number
        while numbers:
            for ready in multiprocessing.connection.wait(list(numbers)):
                assert isinstance(ready, Connection)
                try:
                    results[numbers.pop(ready)] = ready.recv()
                except EOFError as error:
                    raise RapidformerError("a process ended without a result", where=str(cases)) from error
    return [results[number] for number in range(len(cases))]


def _send_result(function: Callable[[Case], Result], case: Case, sender: Connection) -> None:
    sender.send(function(case))
