"""The output of a run without a terminal: each thing once, on standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rapidformer_templates import Data
from rapidformer_templates.errors import counted
from rapidformer_templates.system.terminal import print_lines
from tests.support.lines import Line

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


def test_a_resume_tells_what_is_changed_and_what_is_left_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--save", str(tmp_path / "run")]
    lines(capsys, "--lr", "0.1", *folder)
    told = lines(capsys, "--lr", "0.05", "--weight-decay", "0", "--resume", *folder)
    assert [line for line in told if "changed" in line] == [
        "note       changed since the run was last started: --lr 0.1 → 0.05, --weight-decay its default → 0.0"
    ]
    assert [line for line in told if "left" in line] == ["nothing is left to train: 4 of 4 steps are done"]
    told = lines(capsys, "--lr", "0.05", "--weight-decay", "0", "--resume", *folder)
    assert [line for line in told if "changed" in line] == []
    assert sum("resuming from" in line for line in told) == 1


def test_a_run_of_the_former_default_optimizer_resumes_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = ["--lr", "0.1", "--lr-decay-style", "constant"]
    folder = [*rate, "--save-interval", "2", "--save", str(tmp_path / "run")]
    lines(capsys, "--optimizer", "apex_adam", "--train-iters", "2", *folder)
    plan = tmp_path / "run" / "plan.json"
    content = json.loads(plan.read_text())
    assert content["optimizer"] == "apex_adam"
    del content["values"]["--optimizer"]  # it was the default
    plan.write_text(json.dumps(content))
    resumed = lines(capsys, "--resume", *folder)
    assert any(line.startswith("resuming from") for line in resumed)
    assert "apex" not in "".join(resumed)
    assert "--optimizer" not in "".join(resumed)
    lines(capsys, *rate, "--save", str(tmp_path / "whole"))
    curves = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "whole")]
    assert json.loads(curves[0][-1])["eval_loss"] == json.loads(curves[1][-1])["eval_loss"]


def test_the_results_show_whole_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs of [bold] words" / ("long" * 30)
    Watched([*FLAGS, "--lr", "0.1", "--save", str(folder)]).fit()
    cells = [line.split("│")[-2].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert f"{folder}/metrics.jsonl".replace(" ", "") in "".join(cells).replace(" ", "")


@pytest.mark.parametrize(
    ("iterations", "steps", "has_spread"),
    [("1", "1 (0.5 epochs)", False), ("2", "2 (1 epoch)", False), ("4", "4 (2 epochs)", False), ("5", "5 (2.5 ", True)],
)
def test_the_results_count_epochs_and_show_a_spread_of_several_steps(
    iterations: str, steps: str, has_spread: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Watched([*FLAGS[:2], "--lr", "0.1", "--no-save", "--train-iters", iterations]).fit()
    shown = capsys.readouterr().out
    assert steps in shown
    assert ("±" in shown) == has_spread


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1 step"),
        (0, "0 steps"),
        (12, "12 steps"),
        (0.10643, "0.106 steps"),
        (1.0, "1 step"),
        (2000.0, "2,000 steps"),
    ],
)
def test_numbers_with_their_noun(number: float, text: str) -> None:
    assert counted(number, "step") == text


def test_a_run_goes_on_where_nobody_reads_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Closed())
    print_lines("step 1")
