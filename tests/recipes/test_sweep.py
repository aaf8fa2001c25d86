"""The search recipe: it finds the best of a plain loop, continues a study, and ends bad trials early."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install optuna")

from examples.recipes import sweep  # noqa: E402
from rapidformer_templates import RapidformerError  # noqa: E402
from rapidformer_templates.run.folder import read_metrics  # noqa: E402

FLAGS = ["--device", "cpu", "--epochs", "1", "--micro-batch-size", "64", "--eval-interval", "4"]
STEPS = 16


def _search(folder: Path, rates: list[float], trials: int, *flags: str) -> Any:
    grid = optuna.samplers.GridSampler({"lr": rates, "lr_warmup_fraction": [0.0]}, seed=0)
    return sweep.search([*FLAGS, *flags, "--study", str(folder), "--trials", str(trials)], grid)


def _steps(folder: Path, number: int) -> int:
    return json.loads((folder / f"trial-{number}/summary.json").read_text())["steps"]


def test_the_best_of_a_grid_is_that_of_a_loop_and_a_bad_trial_ends_early(tmp_path: Path) -> None:
    rates = [1e-3, 3e-3, 1e-2]
    plain = {}
    for rate in rates:
        task = sweep.MyTask([*FLAGS, "--no-save"], lr=rate, lr_warmup_fraction=0.0)
        plain[rate] = task.fit()["metrics"]["eval_loss"]
    best = min(rates, key=plain.__getitem__)
    _search(tmp_path, rates, 2)
    study = _search(tmp_path, rates, 3)  # it continues
    assert {trial.params["lr"]: trial.value for trial in study.trials} == plain
    assert study.best_params["lr"] == best
    study = _search(tmp_path, [1e-7], 4)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3 + ["PRUNED"]
    assert study.best_params["lr"] == best
    assert [_steps(tmp_path, i) for i in range(3)] == [STEPS] * 3
    assert _steps(tmp_path, 3) < STEPS
    assert len(_search(tmp_path, [1e-6], 4).trials) == 4  # there is nothing left to do


def test_a_trial_that_early_stopping_ends_is_complete(tmp_path: Path) -> None:
    """Its value is the lowest evaluation loss of the run. The learning rate is too small to change a weight."""
    trial = _search(tmp_path, [1e-30], 1, "--early-stopping-patience", "1", "--metric-for-best", "eval_loss").best_trial
    assert _steps(tmp_path, 0) < STEPS
    lines = read_metrics(tmp_path / "trial-0/metrics.jsonl")
    assert trial.value == pytest.approx(min(line["eval_loss"] for line in lines if "eval_loss" in line))


def _earlier(folder: Path, state: str) -> Any:
    """Make a study with one trial of an earlier start."""
    study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="sweep", direction="minimize")
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState[state]))
    return study


def test_an_interrupted_trial_is_missing(tmp_path: Path) -> None:
    """The next start makes another one, and does not draw the values of the first start again."""
    first = sweep.search([*FLAGS, "--study", str(tmp_path / "first"), "--trials", "1"]).trials[0]
    _earlier(tmp_path, "FAIL")
    study = sweep.search([*FLAGS, "--study", str(tmp_path), "--trials", "1"])
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.trials[1].params != first.params


@pytest.mark.parametrize("flag", ["--lr 1e-3", "--save elsewhere"])
def test_a_flag_that_the_search_sets_is_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(RapidformerError, match=f"the search sets {flag.split()[0]} for each trial"):
        _search(tmp_path, [1e-3], 1, *flag.split())
    assert not (tmp_path / "trial-0").exists()


def test_a_study_without_a_complete_trial_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _earlier(tmp_path, "PRUNED")
    monkeypatch.setattr(sys, "argv", ["sweep.py", *FLAGS, "--study", str(tmp_path), "--trials", "1"])
    with pytest.raises(SystemExit, match="error: no trial is complete"):
        runpy.run_path(sweep.__file__, run_name="__main__")


def test_a_trial_that_diverges_is_pruned(tmp_path: Path) -> None:
    study = _search(tmp_path, [1e30], 1, "--clip-grad", "0")
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]


@pytest.mark.distributed
@pytest.mark.longer
def test_trials_of_two_workers_have_the_values_of_one(tmp_path: Path) -> None:
    found = [
        _search(tmp_path / name, [3e-3], 1, "--global-batch-size", "64", *flags.split()).best_value
        for name, flags in {
            "one": "",
            "two": "--micro-batch-size 32 --nproc-per-node 2 --fsdp-memory-optimization",
        }.items()
    ]
    assert found[1] == pytest.approx(found[0], abs=1e-5)
