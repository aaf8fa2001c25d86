"""Run scripts in the test process, which has already imported everything."""

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as in a process with OMP_NUM_THREADS=1."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_script(script: Path, *words: str) -> int:
    """Run a script as ``python SCRIPT WORDS`` does.

    Returns:
        The exit status.
    """
    command = [str(script), *words]
    # Workers would start with orig_argv, which belongs to pytest.
    with mock.patch.multiple(sys, argv=command, orig_argv=[sys.executable, *command]):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(happened: Callable[[], bool], otherwise: str, seconds: float = 90) -> None:
    """Wait for a condition. After some time, fail with a message."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
