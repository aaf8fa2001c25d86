"""The schedules of transformers: each rate of a run compared with transformers' scheduler, step by step."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.optimization as theirs
from transformers.trainer_utils import SchedulerType

from rapidformer_templates.engines.recipe import schedule
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.schedules import OF_SCHEDULES, SHAPING, STYLES
from rapidformer_templates.run.folder import read_metrics
from tests.support.jobs import CausalJob
from tests.support.messages import Says

LR, STEPS, WARMUP = 0.5, 40, 6
FLOOR = {"min_lr": 0.05}
Case = tuple[str, dict[str, Any], Callable[..., Any], dict[str, Any]]
CASES: list[Case] = [
    ("cosine_with_restarts", {}, theirs.get_cosine_with_hard_restarts_schedule_with_warmup, {}),
    (
        "cosine_with_restarts",
        {"lr_num_cycles": 3},
        theirs.get_cosine_with_hard_restarts_schedule_with_warmup,
        {"num_cycles": 3},
    ),
    ("polynomial", {}, theirs.get_polynomial_decay_schedule_with_warmup, {"lr_end": 0.0}),
    (
        "polynomial",
        {**FLOOR, "lr_power": 2.5},
        theirs.get_polynomial_decay_schedule_with_warmup,
        {"lr_end": 0.05, "power": 2.5},
    ),
    ("constant_with_warmup", {}, theirs.get_constant_schedule_with_warmup, {}),
    ("inverse_sqrt", {}, theirs.get_inverse_sqrt_schedule, {}),
    ("cosine_with_min_lr", FLOOR, theirs.get_cosine_with_min_lr_schedule_with_warmup, FLOOR),
    ("cosine_warmup_with_min_lr", FLOOR, theirs.get_cosine_with_min_lr_schedule_with_warmup_lr_rate, FLOOR),
    ("warmup_stable_decay", {}, theirs.get_wsd_schedule, {"num_decay_steps": 4}),
    *(
        (
            "warmup_stable_decay",
            {**FLOOR, "lr_wsd_decay_iters": 15, "lr_wsd_decay_style": style},
            theirs.get_wsd_schedule,
            {"num_decay_steps": 15, "decay_type": style, "min_lr_ratio": 0.1},
        )
        for style in ("cosine", "linear", "1-sqrt")
    ),
]
WITHOUT_WARMUP: list[Case] = [  # ours reach the peak one step earlier
    ("linear", {}, theirs.get_linear_schedule_with_warmup, {}),
    ("cosine", {}, theirs.get_cosine_schedule_with_warmup, {}),
]
WITHOUT_STEPS = ("constant_with_warmup", "inverse_sqrt")


def rates_of(function: Callable[..., Any], name: str, options: dict[str, Any], warmup: int, steps: int) -> list[float]:
    """Return the rates of transformers' scheduler, driven as its Trainer drives it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    total = {} if name in WITHOUT_STEPS else {"num_training_steps": steps}
    scheduler = function(optimizer, num_warmup_steps=warmup, **total, **options)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("case", "warmup"),
    [*((case, warmup) for case in CASES for warmup in (0, WARMUP)), *((case, 0) for case in WITHOUT_WARMUP)],
    ids=lambda value: "-".join([value[0], *map(str, value[1].values())]) if isinstance(value, tuple) else str(value),
)
def test_rates_are_those_of_transformers(case: Case, warmup: int) -> None:
    name, flags, function, options = case
    training = TrainingFlags(lr=LR, lr_decay_style=name, lr_warmup_iters=warmup, **flags)  # type: ignore[arg-type]
    share = schedule(training, STEPS)
    assert [LR * share(step) for step in range(STEPS)] == pytest.approx(
        rates_of(function, name, options, warmup, STEPS), abs=1e-15
    )


def test_every_schedule_of_transformers_that_is_a_function_of_the_step_is_there() -> None:
    assert STYLES.keys() == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}
    assert {case[0] for case in CASES} == {name for name, style in STYLES.items() if style.of_transformers}
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingFlags)}
    assert set(SHAPING) <= defaults.keys()
    assert {name for name in defaults if name.startswith("lr_")} <= set(OF_SCHEDULES)


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.of_transformers and style.decays])
def test_after_the_decay_the_rate_stays(name: str) -> None:
    flags = FLOOR if "min_lr" in STYLES[name].takes else {}
    training = TrainingFlags(lr=LR, lr_decay_style=name, lr_decay_iters=20, **flags)  # type: ignore[arg-type]
    share = schedule(training, 60)
    assert share(10) > share(19) >= share(20)
    assert share(20) == share(21) == share(59) == pytest.approx(0.1 if flags else 0.0)


def test_the_rates_of_a_run_and_of_its_resume(tmp_path: Path) -> None:
    """Compare the logged rates of a run in two parts with those of transformers."""
    flags = f"--train-iters 12 --global-batch-size 2 --lr {LR} --lr-decay-style warmup_stable_decay --lr-warmup-iters 3"
    flags += f" --min-lr 0.05 --lr-wsd-decay-iters 4 --log-interval 1 --no-export-model --save {tmp_path}"
    job = CausalJob([*flags.split(), "--save-interval", "5"])
    stopped = job.on_step_end

    def stop_after_five(step: int, result: Any) -> None:
        stopped(step, result)
        if step == 7:
            raise InterruptedError

    job.on_step_end = stop_after_five  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        job.fit()
    CausalJob([*flags.split(), "--resume"]).fit()
    logged = [line["lr"] for line in read_metrics(tmp_path / "metrics.jsonl") if "lr" in line]
    options = {"num_decay_steps": 4, "min_lr_ratio": 0.1}
    assert logged == pytest.approx(rates_of(theirs.get_wsd_schedule, "warmup_stable_decay", options, 3, 12), abs=1e-15)


def test_warmup_floor_and_end_of_the_decay() -> None:
    factor = schedule(TrainingFlags(lr=0.5, min_lr=0.1, lr_warmup_iters=4, lr_decay_iters=14), 100)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factor(9) == pytest.approx(0.2 + 0.8 * 0.5)
    assert factor(14) == factor(99) == pytest.approx(0.2)
    in_samples = schedule(
        TrainingFlags(lr=0.5, min_lr=0.1, lr_warmup_samples=13, lr_decay_iters=14), 100, global_batch=4
    )
    assert [in_samples(step) for step in range(20)] == [factor(step) for step in range(20)]


def test_constant_keeps_the_peak() -> None:
    factor = schedule(TrainingFlags(lr=0.5, lr_decay_style="constant", lr_warmup_fraction=0.1), 20)
    assert [factor(0), factor(1), factor(2), factor(19)] == [0.5, 1.0, 1.0, 1.0]


SHORT_DECAYS: list[dict[str, Any]] = [
    {"lr_decay_style": "polynomial", "lr_warmup_fraction": 1.0},
    {"lr_decay_style": "warmup_stable_decay", "lr_warmup_iters": 15, "lr_wsd_decay_iters": 6},
    {"lr_warmup_iters": 30},
    {"lr_warmup_iters": 30, "lr_decay_iters": 50},
]


@pytest.mark.parametrize("flags", SHORT_DECAYS, ids=lambda flags: " ".join(f"{name} {flags[name]}" for name in flags))
def test_a_warmup_that_leaves_no_step_to_decay_in_is_refused(flags: dict[str, Any], says: Says) -> None:
    """Only the run knows the number of steps."""
    with says(ConfigError):
        schedule(TrainingFlags(lr=LR, **flags), 20)
