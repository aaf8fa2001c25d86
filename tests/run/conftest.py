"""Runs that several test files of this folder use for comparison."""

from __future__ import annotations

import pytest

from tests.support.engine_runs import ENGINES, WholeRuns, run_all
from tests.support.worker_pool import run_in_workers


@pytest.fixture(scope="session")
def whole_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    """Train with the engines that the selected tests name, or with all if one of these tests names none."""
    readers = [item for item in request.session.items if "whole_runs" in getattr(item, "fixturenames", ())]
    parameters = [item.callspec.params if hasattr(item, "callspec") else {} for item in readers]
    named = {value for found in parameters for name, value in found.items() if name != "target"}
    root = tmp_path_factory.mktemp("whole-runs")
    names = [name for name in ENGINES if name in named or {} in parameters]
    return WholeRuns(root, run_in_workers(2, run_all, str(root), names)[0])
