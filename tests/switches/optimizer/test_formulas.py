"""Optimizers compared with their formulas, parameter groups, and schedules compared with transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from rapidformer_templates.engines.recipe import OptimizerSpec, default_optimizer, schedule
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.optimizer.updates import Lamb


def test_lamb_follows_algorithm_2_in_fp64() -> None:
    """Compare with the update of the paper, written in numpy."""
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(4, 3))
    parameter = nn.Parameter(torch.tensor(weight))
    optimizer = Lamb([parameter], lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, 8):
        gradient = draw.normal(size=weight.shape)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        update = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-6) + 0.1 * weight
        weight = weight - 0.02 * np.linalg.norm(weight) / np.linalg.norm(update) * update
    np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)


def test_lamb_of_a_zero_weight_moves_it() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    Lamb([parameter], lr=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.1), rtol=1e-4, atol=0)


def test_biases_and_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    named = list(model.named_parameters())
    spec = OptimizerSpec(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2})
    optimizer = spec.build(named, spec.differences(named))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in named} == {
        "0.weight": 0.2,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


def test_parameters_with_equal_options_share_a_group() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    named = list(model.named_parameters())
    spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, lambda name, p: {"lr": 0.01} if name.startswith("0.") else {})
    groups = spec.build(named, spec.differences(named)).param_groups
    assert sorted((group["lr"], len(group["params"])) for group in groups) == [(0.01, 2), (0.1, 4)]


@pytest.mark.parametrize(
    ("implementation", "kind", "fused"),
    [
        ("torch.optim.AdamW (fused)", torch.optim.AdamW, True),
        ("torch.optim.AdamW", torch.optim.AdamW, None),
        ("torch.optim.Adafactor", torch.optim.Adafactor, None),
        ("rapidformer_templates.switches.optimizer.updates.Lamb", Lamb, None),
    ],
)
def test_the_plan_decides_the_class(implementation: str, kind: type, fused: bool | None) -> None:
    spec = default_optimizer(
        Plan("Trainer", optimizer_implementation=implementation), TrainingFlags(lr=0.1, weight_decay=0.3)
    )
    assert spec.cls is kind
    assert spec.kwargs.get("fused") is fused
    assert spec.kwargs["lr"] == 0.1
    assert spec.kwargs["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("style", "reference"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_decay_is_that_of_transformers(style: str, reference: object) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = reference(optimizer, 0, 50)  # type: ignore[operator]
    ours = schedule(TrainingFlags(lr=0.5, lr_decay_style=style), 50)  # type: ignore[arg-type]
    for step in range(50):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


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


def test_warmup_longer_than_the_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match="a warmup of 30 steps is longer than the decay of 20 steps"):
        schedule(TrainingFlags(lr=0.5, lr_warmup_iters=30), 20)
    with pytest.raises(ConfigError, match="a warmup of 30 steps is longer than the run of 20 steps"):
        schedule(TrainingFlags(lr=0.5, lr_warmup_iters=30, lr_decay_iters=50), 20)
