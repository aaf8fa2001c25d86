"""Runs that several test files of this folder use for comparison."""

from __future__ import annotations

import pytest

from tests.support.engine_runs import WholeRuns, run_all
from tests.support.worker_pool import run_in_workers


@pytest.fixture(scope="session")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    root = tmp_path_factory.mktemp("whole-runs")
    return WholeRuns(root, run_in_workers(2, run_all, str(root))[0])
