"""A worker of the tests' pool outlives the garbage of the process that it is forked from."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rapidformer_templates.system.workers import open_group_alone
from tests.support.worker_pool import end_pool, leave_group, run_in_workers


def collected(workers: Any) -> bool:
    """Collect all garbage, also what this process has from before the fork."""
    gc.unfreeze()
    gc.collect()
    return True


@pytest.mark.distributed
def test_workers_do_not_inherit_a_group_that_waits_for_its_threads() -> None:
    run_in_workers(1, collected)  # the first start of a pool imports modules and collects garbage
    end_pool()
    gc.disable()
    try:
        open_group_alone(torch.device("cpu"))
        garbage = SimpleNamespace(group=torch.distributed.group.WORLD)
        garbage.itself = garbage
        torch.distributed.all_reduce(torch.ones(1))
        leave_group()
        del garbage
        assert run_in_workers(1, collected) == [True]
    finally:
        gc.enable()
        end_pool()
