"""A job whose last worker is killed in its fourth step, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.parity.jobs import CausalJob


class Job(CausalJob):
    def on_step_end(self, step: int, result: Any) -> None:
        mark = Path(os.environ["DIED_ONCE"])
        if step == 4 and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Job.main()
