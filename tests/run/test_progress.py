"""The output of a run: each thing once on standard error, a picture of its curves, and the files of ``--profile``."""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch._C._autograd import DeviceType

from rapidformer_templates import Data
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.console import LEAST_SMOOTHED, RATE, SPEED, curves_of, draw_curves
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.performance import DATA, STEP, TRAIN, WARMUP, Meter, summary
from rapidformer_templates.system.terminal import print_lines
from tests.support.lines import FLAGS as LINE
from tests.support.lines import Line
from tests.support.messages import Says
from tests.support.selection import by_default

FLAGS = ["--micro-batch-size", "10", "--train-iters", "4", "--eval-interval", "2", "--save-interval", "4"]


class Watched(Line):
    """A Line with an evaluation."""

    def build_data(self) -> Data:
        data = super().build_data()
        data.valid = data.train
        return data


def lines(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    Watched([*FLAGS, *flags]).fit()
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning")]


def test_a_line_for_each_log_evaluation_and_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(capsys, "--lr", "0.1", "--log-interval", "2", "--save", str(tmp_path / "run"))
    steps = [line for line in told if line.startswith("step ")]
    starts = [("2/4", "loss"), ("2/4", "eval_loss"), ("4/4", "loss"), ("4/4", "eval_loss"), ("4/4", "saved")]
    assert [tuple(line.split()[1:3]) for line in steps] == starts
    assert " grad norm " in steps[0]
    assert " lr 0.075 " in steps[0]
    assert steps[-1].endswith("run/checkpoints/step-4")
    assert len(told) == len(set(told))


def test_a_resume_tells_what_is_changed_and_left_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--save", str(tmp_path / "run")]
    lines(capsys, "--lr", "0.1", *folder)
    told = lines(capsys, "--lr", "0.05", "--weight-decay", "0", "--resume", *folder)
    assert [line for line in told if "changed" in line] == [
        "note       changed since the run was last started: --lr 0.1 → 0.05, --weight-decay 0.01 → 0.0"
    ]
    assert [line for line in told if "left" in line] == ["nothing is left to train: 4 of 4 steps are done"]
    told = lines(capsys, "--lr", "0.05", "--weight-decay", "0", "--resume", *folder)
    assert [line for line in told if "changed" in line] == []
    assert sum("resuming from" in line for line in told) == 1
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    plan["defaults"] |= {"--fsdp-reduce-every-micro-batch": False, "--of-an-older-version": 1}
    (tmp_path / "run/plan.json").write_text(json.dumps(plan))
    told = lines(capsys, "--lr", "0.05", "--weight-decay", "0", "--resume", *folder)
    assert [line for line in told if "changed" in line] == [
        "note       changed since the run was last started: --fsdp-reduce-every-micro-batch False → True"
    ]


@pytest.mark.parametrize(("iterations", "steps"), [("1", "1 (0.5 epochs)"), ("4", "4 (2 epochs)"), ("5", "5 (2.5 ")])
def test_the_results_count_epochs_and_show_a_spread(
    iterations: str, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Watched([*FLAGS[:2], "--lr", "0.1", "--no-save", "--train-iters", iterations]).fit()
    shown = capsys.readouterr().out
    assert steps in shown
    assert ("±" in shown) == (iterations == "5")


def test_a_run_goes_on_where_nobody_reads_its_lines() -> None:
    broken = BrokenPipeError(32, "Broken pipe")
    with mock.patch.object(sys, "stderr", mock.Mock(**{"write.side_effect": broken, "flush.side_effect": broken})):
        print_lines("step 1")


def picture(folder: Path, lines: Sequence[Mapping[str, Any]]) -> np.ndarray[Any, Any]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(RunFolder(folder))
    return np.round(255 * imread(folder / "curves.png")[..., :3]).astype(int)


def train_line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 2.0 / step, "samples_per_second": 100.0}


SPEEDS = {SPEED: {SPEED: [(1, 100.0), (2, 100.0)]}}
CURVES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([], {}),
    ([{"step": 4, "test/loss": 0.1}, {"step": 4, "accuracy": 0.5}], {}),
    ([train_line(1), train_line(2)], {"loss": {"training": [(1, 2.0), (2, 1.0)]}, **SPEEDS}),
    ([{"step": 4, "eval_loss": None}, {"step": 8, "hard/loss": 0.5}], {"loss": {"hard": [(8, 0.5)]}}),
    ([{"step": 4, "loss": None, "samples_per_second": 9.0}], {SPEED: {SPEED: [(4, 9.0)]}}),
]
"""Lines of metrics, and the panels with the curves in them."""


@pytest.mark.parametrize(("lines", "panels"), by_default([CURVES[0], CURVES[2]], CURVES))
def test_there_are_no_empty_panels(lines: list[dict[str, Any]], panels: Mapping[str, Any], tmp_path: Path) -> None:
    assert curves_of(lines) == panels
    if panels:
        assert len(picture(tmp_path, lines)) == 330 * len(panels)  # 3 inches each
    else:
        (tmp_path / "metrics.jsonl").touch()
        draw_curves(RunFolder(tmp_path))
        assert not (tmp_path / "curves.png").exists()


def test_the_loss_that_is_the_metric_of_the_best_is_not_drawn_twice() -> None:
    lines = [{"step": 4, "eval_loss": 0.5, "mine/loss": 0.4}]
    assert list(curves_of(lines, "mine/loss")) == ["loss"]
    assert curves_of([*lines, {"step": 8, "bleu": 3.0}], "bleu")["bleu"] == {"bleu": [(8, 3.0)]}


@pytest.mark.longer
def test_the_picture_has_title_best_rate_and_smooth_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = mock.Mock(wraps=Figure.savefig)
    monkeypatch.setattr(Figure, "savefig", lambda *args, **named: saved(*args, **named))
    lines: list[dict[str, Any]] = [{**train_line(step), "lr": 1e-3} for step in range(1, LEAST_SMOOTHED + 1)]
    lines += [{"step": step, "eval_loss": 1.0, "accuracy": 1 / step} for step in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(RunFolder(tmp_path), {"step": 10, "metric": "accuracy", "value": 0.1})
    figure = saved.call_args.args[0]
    assert figure.get_suptitle() == f"{tmp_path.name}: best accuracy 0.1 at step 10"
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy", RATE, SPEED]
    curves = [[list(line.get_ydata()) for line in axes.get_lines()] for axes in figure.axes]
    losses = [line["loss"] for line in lines if "loss" in line]
    raw, smooth, validation = curves[0][:3]
    assert raw == losses
    np.testing.assert_allclose(smooth, pd.Series(losses).ewm(alpha=0.1).mean(), rtol=1e-12)
    assert validation == [1.0, 1.0]
    assert curves[1][0] == [0.1, 0.05]
    assert curves[2][0] == [1e-3] * LEAST_SMOOTHED
    for axes in figure.axes:
        assert list(axes.get_lines()[-1].get_xdata()) == [10, 10]
    assert (tmp_path / "curves.png").exists()


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
    _SlowData([*LINE, "--epochs", "2", "--save", str(tmp_path / "run"), "--profile", "4"]).fit()
    folder = tmp_path / "run/profile"
    found = json.loads((folder / "summary.json").read_text())
    assert found["steps"] == 4
    assert found["waiting_for_data_ms"] >= 20
    assert found["python_ms"] >= 10
    assert found["outside_operators_share"] > 0.5
    assert found["host_waits_a_step"]["aten::_local_scalar_dense"] >= 2  # a CPU reads loss and norm
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mse_loss" for event in trace)
    assert "waiting for data" in (folder / "table.txt").read_text()


def test_profile_needs_a_folder_and_steps(tmp_path: Path, says: Says) -> None:
    flags = [*LINE, "--epochs", "1", "--profile"]
    assert Line([*flags, "--save", str(tmp_path)]).config.training.profile == 5
    for more in (["--no-save"], ["--save", str(tmp_path / "run")]):
        with says(ConfigError):
            Line([*flags, *more]).fit()


@pytest.mark.parametrize(
    ("seconds", "mean", "sd"),
    [
        ([1.0] * 20, 4.0, 0.0),
        (([0.001] * 9 + [0.991]) * 20, 40.0, 0.0),  # a device computes for 0.1 s, and the host waits each tenth step
        ([1.0] * 10 + [3.0] * 10, 2.0, statistics.stdev([4.0] * 2 + [4.0 / 2 + 2.0 / 3] + [4.0 / 3] * 7)),
    ],
)
def test_the_spread_of_the_throughput(seconds: list[float], mean: float, sd: float) -> None:
    times = itertools.accumulate([0.0] * (1 + WARMUP) + seconds)
    with mock.patch("time.perf_counter", side_effect=times):
        meter = Meter(torch.device("cpu"))
        for _ in range(WARMUP + len(seconds)):
            meter.step(4, 0)
    totals = meter.totals()
    assert totals["samples_per_second"] == pytest.approx(mean)
    assert totals["samples_per_second_sd"] == pytest.approx(sd, abs=1e-3)
