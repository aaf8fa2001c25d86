"""The search recipe: it finds the best of a plain loop, continues a study, and ends bad trials early."""

import json
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install optuna")

from examples.recipes import sweep  # noqa: E402

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
