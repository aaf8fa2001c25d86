"""Trackers that ``--report-to`` accepts, and values that are refused before a run starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flag_values import TrackerNames, chosen_trackers
from rapidformer_templates.planning.registry import switch_options
from tests.support.requests import CPU, codes, on, refusal

RUN = "--task causal_lm --train-iters 10 --lr 1e-3 --save DIR"
WITH_TWO = on(CPU, packages={"tensorboard": "2.21.0", "mlflow": "unknown"})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--report-to tensorboard", []),
        ("--report-to mlflow,tensorboard --run-name a --project-name b", []),
        ("--report-to all", []),
        ("--report-to none", []),
        ("--report-to wandb", ["RF160"]),
        ("--report-to tensorboard,wandb,trackio", ["RF160", "RF160"]),
        ("--run-name a", ["RF034"]),
        ("--project-name a", ["RF034"]),
    ],
)
def test_combinations(flags: str, expected: list[str]) -> None:
    assert codes(parse(shlex.split(f"{RUN} {flags}"), switch_options()), WITH_TWO) == expected


def test_what_is_missing_is_named_with_its_install() -> None:
    text = refusal(f"{RUN} --report-to tensorboard,wandb", WITH_TWO)
    assert "wandb is not installed: pip install 'rapidformer_templates[trackers]'" in text
    assert "works  --report-to tensorboard" in text
    text = refusal(f"{RUN} --report-to all", CPU)
    assert "no tracker is installed: pip install 'rapidformer_templates[trackers]'" in text
    text = refusal(f"{RUN.replace('--save DIR', '--no-save')} --report-to mlflow", WITH_TWO)
    assert "--report-to acts on a run folder, but there is none" in text


@pytest.mark.parametrize("text", ["tensorbord", "wandb,wandb", "all,wandb", "", "none,all"])
def test_what_names_no_tracker(text: str) -> None:
    with pytest.raises(ConfigError, match="--report-to needs names of tensorboard, wandb, mlflow, trackio"):
        parse(["--report-to", text], switch_options())


def test_a_list_of_a_file_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("report_to: [wandb, TensorBoard]\n")
    asked = parse(["--config", str(tmp_path / "run.yaml")], switch_options()).training.report_to
    assert asked == TrackerNames("wandb,tensorboard")
    assert asked is not None
    assert asked.names == chosen_trackers(str(asked), ()) == ("wandb", "tensorboard")
    assert chosen_trackers("all", {"mlflow", "trackio", "torch"}) == ("mlflow", "trackio")
