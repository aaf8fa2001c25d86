"""The schedules of a DeepSpeed file, compared with DeepSpeed's own, update by update."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from rapidformer_templates.planning.schedules import DEEPSPEED_PARAMETERS, deepspeed_rates

lr_schedules = pytest.importorskip(
    "deepspeed.runtime.lr_schedules", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'"
)
pytestmark = pytest.mark.deepspeed

LR = 3e-4
WARMUP = {"warmup_min_lr": 1e-5, "warmup_max_lr": LR, "warmup_num_steps": 7}
CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": LR, "cycle_momentum": False, "cycle_first_step_size": 5}
CASES = [
    ("WarmupLR", {}),
    ("WarmupLR", WARMUP),
    ("WarmupLR", {**WARMUP, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": LR}),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 20}),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 20, "warmup_type": "linear"}),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 3}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 7}),
    ("OneCycle", CYCLE),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 9, "decay_step_size": 2, "decay_lr_rate": 0.3}),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 7, "cycle_first_stair_count": 3}),
    ("OneCycle", {**CYCLE, "cycle_first_stair_count": 2, "cycle_second_stair_count": 4}),
    ("LRRangeTest", {"lr_range_test_min_lr": LR, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.7}),
    ("LRRangeTest", {"lr_range_test_min_lr": LR, "lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
]


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_each_update_runs_at_deepspeeds_rate(kind: str, given: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = getattr(lr_schedules, kind)(optimizer, **given)
    ours = deepspeed_rates({"type": kind, "params": given}, lr=LR, warmup=0, total=0)
    for update in range(40):
        assert ours(update) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=0), update
        theirs.step()


@pytest.mark.parametrize("kind", DEEPSPEED_PARAMETERS)
def test_parameters_and_defaults_are_deepspeeds(kind: str) -> None:
    theirs = inspect.signature(getattr(lr_schedules, kind)).parameters.values()
    ours = DEEPSPEED_PARAMETERS[kind]
    # We decide which update comes first: a resumed run continues from its last update.
    assert set(ours) == {p.name for p in theirs} - {"optimizer", "last_batch_iteration"}
    for parameter in theirs:
        if parameter.name in ours:
            default = None if parameter.default is parameter.empty else parameter.default
            assert ours[parameter.name] == default, parameter.name


def test_auto_is_filled_as_the_guide_says() -> None:
    given = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    ours = deepspeed_rates({"type": "WarmupDecayLR", "params": given}, lr=LR, warmup=4, total=12)
    told = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 4, "total_num_steps": 12}
    theirs = deepspeed_rates({"type": "WarmupDecayLR", "params": told}, lr=0.0, warmup=0, total=0)
    assert [ours(update) for update in range(14)] == [theirs(update) for update in range(14)]
    assert max(ours(update) for update in range(14)) == LR
    assert ours(13) == 0.0
