"""``--profile``: the files that it writes, and the correctness of its shares."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.performance import DATA, STEP, TRAIN, read_summary, summary
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says


def _event(name: str, start: float, end: float, device: Any = DeviceType.CPU) -> Any:
    time_range = SimpleNamespace(start=start * 1000, end=end * 1000)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device)


def test_time_is_told_apart() -> None:
    events = [
        _event(STEP, 0, 10),
        _event(DATA, 0, 3),
        _event("aten::stack", 1, 2),
        _event(TRAIN, 4, 9),
        _event("aten::linear", 4, 7),
        _event("aten::mm", 5, 6),  # inside of it
        _event("aten::mm", 100, 110),  # outside of the step
        _event("cudaStreamSynchronize", 8, 9),
        _event("kernel", 5, 8, DeviceType.CUDA),
        _event("kernel", 7, 9, DeviceType.CUDA),
        _event("kernel", 11, 13, DeviceType.CUDA),
        _event(TRAIN, 4, 40, DeviceType.CUDA),
    ]
    found = summary(events, 1)
    assert (found["step_ms"], found["operators_ms"], found["waiting_for_data_ms"]) == (10, 4, 2)
    assert found["python_ms"] == 4
    assert found["outside_operators_share"] == pytest.approx(0.6)
    assert found["host_waits_a_step"]["cudaStreamSynchronize"] == 1
    assert (found["device_busy_ms"], found["device_idle_share"]) == (6, 0.25)


class _SlowData(Line):
    """Each batch takes 20 ms to load, and each loss 10 ms of Python."""

    def count_targets(self, batch: Any) -> float:
        time.sleep(0.02)
        return super().count_targets(batch)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        time.sleep(0.01)
        return super().compute_loss(model, batch)


@pytest.mark.slow
def test_a_run_writes_where_its_time_went(tmp_path: Path) -> None:
    _SlowData([*FLAGS, "--epochs", "2", "--save", str(tmp_path / "run"), "--profile", "4"]).fit()
    folder = tmp_path / "run/profile"
    found = read_summary(folder)
    assert found["steps"] == 4
    assert found["waiting_for_data_ms"] >= 20
    assert found["python_ms"] >= 10
    assert found["outside_operators_share"] > 0.5
    assert found["host_waits_a_step"]["aten::_local_scalar_dense"] >= 2  # a CPU reads loss and norm
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mse_loss" for event in trace)
    assert "waiting for data" in (folder / "table.txt").read_text()


def test_profile_needs_a_folder_and_steps(tmp_path: Path, says: Says) -> None:
    flags = [*FLAGS, "--epochs", "1", "--profile"]
    assert Line([*flags, "--save", str(tmp_path)]).config.training.profile == 5
    for more in (["--no-save"], ["--save", str(tmp_path / "run")]):
        with says(ConfigError):
            Line([*flags, *more]).fit()
