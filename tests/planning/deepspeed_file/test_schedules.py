"""The schedules of a DeepSpeed file: each update runs at the rate that DeepSpeed has after as many steps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from rapidformer_templates.engines.recipe import deepspeed_rates
from rapidformer_templates.planning.schedules import DEEPSPEED_SCHEDULES

lr_schedules = pytest.importorskip(
    "deepspeed.runtime.lr_schedules", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'"
)
pytestmark = pytest.mark.deepspeed

LR = 3e-4
WARMUP = {"warmup_min_lr": 1e-5, "warmup_max_lr": LR, "warmup_num_steps": 7}
CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": LR, "cycle_momentum": False, "cycle_first_step_size": 5}
CASES = [
    ("WarmupLR", {}),
    ("WarmupLR", {**WARMUP, "warmup_num_steps": 7.0, "warmup_type": "linear"}),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 20}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 9, "decay_step_size": 2, "decay_lr_rate": 0.3}),
    ("LRRangeTest", {"lr_range_test_min_lr": LR, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.7}),
]


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_each_update_runs_at_deepspeeds_rate(kind: str, given: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = getattr(lr_schedules, kind)(optimizer, **{k: int(v) if v == 7 else v for k, v in given.items()})
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step()
    ours = deepspeed_rates({"type": kind, "params": given}, lr=LR, warmup=0, total=0)
    assert [ours(update) for update in (39, 0, 12)] == [expected[39], expected[0], expected[12]]  # in any order
    assert [ours(update) for update in range(40)] == expected


def test_a_linear_warmup_is_a_line() -> None:
    given = {"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}
    ours = deepspeed_rates({"type": "WarmupLR", "params": given}, lr=LR, warmup=0, total=0)
    rates = [0, 0, LR / 4, LR / 2, LR * 3 / 4, LR, LR]  # it moves after an update, so the first two are the lowest
    assert [ours(update) for update in range(7)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("kind", DEEPSPEED_SCHEDULES)
def test_parameters_that_are_flags_and_their_defaults_are_deepspeeds(kind: str) -> None:
    theirs = inspect.signature(getattr(lr_schedules, kind)).parameters
    defaults = {name: theirs[name].default for name in DEEPSPEED_SCHEDULES[kind]}
    defaults = {name: None if value is inspect.Parameter.empty else value for name, value in defaults.items()}
    assert defaults == DEEPSPEED_SCHEDULES[kind]


def test_auto_is_filled_as_the_guide_says() -> None:
    given = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    ours = deepspeed_rates({"type": "WarmupDecayLR", "params": given}, lr=LR, warmup=4, total=12)
    told = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 4, "total_num_steps": 12}
    theirs = deepspeed_rates({"type": "WarmupDecayLR", "params": told}, lr=0.0, warmup=0, total=0)
    assert [ours(update) for update in range(14)] == [theirs(update) for update in range(14)]
    assert max(ours(update) for update in range(14)) == LR
    assert ours(13) == 0.0
