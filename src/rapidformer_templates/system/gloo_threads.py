"""Waits for gloo's threads to release their tensors before the interpreter exits. Imports no torch."""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

THREADS = "pt_gloo_runloop"
LOOKS, BETWEEN, PATIENCE = 3, 0.002, 10.0
"""Number of checks in a row that find all threads asleep, seconds between checks, and maximum seconds in all."""


@cache
def wait_at_exit() -> None:
    """Wait before the interpreter exits until gloo's threads have released what they have exchanged.

    A thread releases a tensor some time after the collective has completed, and needs the interpreter's lock for that.
    Before 3.14, CPython unwinds the stacks of threads that ask for the lock during finalization. C++ then calls abort,
    so SIGABRT would kill a worker whose run was successful. This happened when processes shared few cores, and a core
    dump showed the cause.
    """
    atexit.register(_wait_until_asleep)


def _wait_until_asleep() -> None:
    asleep, end = 0, time.monotonic() + PATIENCE
    while asleep < LOOKS and time.monotonic() < end:
        time.sleep(BETWEEN)  # release the lock, which a sleeping thread may be waiting for
        asleep = 0 if any(state != "S" for state in _states()) else asleep + 1


def _states() -> list[str]:
    """Return the state of each thread as the kernel reports it. Empty without such a file system."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended in the meantime
            continue
        if name == THREADS:
            states.append(rest.split()[0])
    return states
