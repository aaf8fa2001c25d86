"""Evaluations and checkpoints by samples, tokens and minutes happen in the steps given by the counts and the clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rapidformer_templates.run import steps as run_steps
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import CausalJob
from tests.support.lines import Line
from tests.support.worker_pool import run_in_workers

FLAGS = "--train-iters 10 --global-batch-size 8 --lr 1e-3 --log-interval 1 --keep-checkpoints 99 --no-export-model"


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if name in line]


def train(folder: Path, flags: str) -> Path:
    CausalJob([*f"{FLAGS} --micro-batch-size 4 {flags}".split(), "--save", str(folder)]).fit()
    return folder


def crossings(counts: list[int], every: int) -> list[int]:
    """Return the steps (from 1) in which a multiple was reached, and the last step."""
    with_zero = itertools.pairwise([0, *counts])
    found = [step for step, (before, after) in enumerate(with_zero, 1) if after // every > before // every]
    return sorted({*found, len(counts)})


def test_a_run_prints_about_20_lines_and_writes_a_point_for_each_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lr", "0.01", "--micro-batch-size", "20", "--train-iters", "250", "--device", "cpu"]
    Line([*flags, "--save", str(tmp_path)]).fit()
    assert [line["step"] for line in lines(tmp_path, "lr")] == [*range(2, 251, 2)]
    printed = [line.split("/")[0] for line in capsys.readouterr().err.splitlines() if " grad norm " in line]
    assert printed == [f"step {step}" for step in (*range(12, 241, 12), 250)]


@pytest.mark.parametrize(
    ("steps", "points", "printed"),
    [(1, 1, 1), (10, 10, 10), (60, 60, 20), (199, 199, 20), (1_000, 100, 20), (30_000, 300, 20), (10**6, 10**4, 20)],
)
def test_numbers_of_lines(steps: int, points: int, printed: int) -> None:
    log, show = run_steps.log_intervals(steps, None)
    assert show % log == 0
    assert (-(-steps // log), -(-steps // show)) == (points, printed)
    assert run_steps.log_intervals(steps, 7) == (7, 7)


@pytest.mark.slow
def test_by_samples_and_tokens(tmp_path: Path) -> None:
    folder = train(tmp_path, "--save-interval 20samples --eval-interval 300tokens")
    tokens = [line["tokens"] for line in lines(folder, "lr")]
    assert saved(folder) == crossings([8 * step for step in range(1, 11)], 20) == [3, 5, 8, 10]
    assert 3 < len(crossings(tokens, 300)) < 10, "the case tells steps from tokens"
    assert [line["step"] for line in lines(folder, "eval_loss")] == crossings(tokens, 300)


@pytest.mark.slow
def test_an_interval_shorter_than_a_step_is_a_step(tmp_path: Path) -> None:
    folder = train(tmp_path, "--save-interval 0.00001epochs --eval-interval 0.00001epochs")
    assert saved(folder) == [line["step"] for line in lines(folder, "eval_loss")] == list(range(1, 11))


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_places(tmp_path: Path) -> None:
    flags = "--save-interval 300tokens --eval-interval 20samples"
    whole = train(tmp_path / "whole", flags)
    job = CausalJob([*f"{FLAGS} --micro-batch-size 4 {flags}".split(), "--save", str(tmp_path / "cut")])
    with pytest.raises(InterruptedError), mock.patch.object(job, "on_step_end", _dies_in_step(6)):
        job.fit()
    cut = train(tmp_path / "cut", f"{flags} --resume")
    assert saved(cut) == saved(whole)
    assert (
        [x["step"] for x in lines(cut, "eval_loss")] == [x["step"] for x in lines(whole, "eval_loss")] == [3, 5, 8, 10]
    )


def _dies_in_step(last: int) -> Callable[..., None]:
    def on_step_end(step: int, result: Any) -> None:
        if step == last:
            raise InterruptedError

    return on_step_end


def _by_clock(workers: Workers, folder: str) -> list[int]:
    """Each reading of the main worker's clock is 20 seconds after the previous one. The other clock does not move."""
    with mock.patch.object(run_steps, "now", side_effect=itertools.count(0, 20 if workers.rank == 0 else 0)):
        job = CausalJob([*f"{FLAGS} --micro-batch-size 4 --save-interval 1min".split(), "--save", folder])
        with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
            job.fit()
    return saved(Path(folder))


@pytest.mark.slow
def test_by_minutes(tmp_path: Path) -> None:
    # The clock is read at the start, before each step, and after a save. So a save is due in the third step after each.
    wanted = [3, 6, 9, 10]
    with mock.patch.object(run_steps, "now", side_effect=itertools.count(0, 20)):
        assert saved(train(tmp_path / "alone", "--save-interval 1min")) == wanted


@pytest.mark.distributed
def test_all_workers_go_by_one_clock(tmp_path: Path) -> None:
    assert run_in_workers(2, _by_clock, str(tmp_path)) == [[3, 6, 9, 10]] * 2
