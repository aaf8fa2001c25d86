"""The threads of gloo, which must have let go of their tensors before an interpreter ends. Imports no torch."""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

THREADS = "pt_gloo_runloop"
LOOKS, BETWEEN, PATIENCE = 3, 0.002, 10.0
"""In how many looks, s apart, they must all have been asleep; and how many s to wait for that at most."""


@cache
def let_go_at_exit() -> None:
    """Before this interpreter ends, wait for gloo's threads to drop what they have exchanged.

    A thread drops a tensor behind the collective that somebody has waited for, and needs the interpreter's lock for
    that. Before 3.14 CPython ends threads that ask for the lock while it finalizes by unwinding their stacks, which
    C++ answers with an abort: a worker whose run is over and well would be killed by SIGABRT. It was seen, and read
    off a core, where processes shared few cores.
    """
    atexit.register(_wait_until_asleep)


def _wait_until_asleep() -> None:
    asleep, end = 0, time.monotonic() + PATIENCE
    while asleep < LOOKS and time.monotonic() < end:
        time.sleep(BETWEEN)  # without the lock, which a sleeping thread may be waiting for
        asleep = 0 if any(state != "S" for state in _states()) else asleep + 1


def _states() -> list[str]:
    """What each of the threads does, as the kernel says it; none where there is no such file system."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if name == THREADS:
            states.append(rest.split()[0])
    return states
