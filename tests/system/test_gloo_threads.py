"""A process that exits right after its collectives exits cleanly."""

from __future__ import annotations

import subprocess
import sys

import pytest

BUSY = """
import sys
import torch
import torch.distributed as dist
from rapidformer_templates.system.workers import open_group_alone

open_group_alone(torch.device("cpu"))
sys.setswitchinterval(60)  # as on a busy machine, where the threads get no turn
for _ in range(100):
    dist.all_reduce(torch.ones(1000), async_op=True)
print("the run is over", flush=True)
"""


@pytest.mark.distributed
def test_threads_let_go_before_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the run is over\n", "")
