"""The learning-rate schedules of transformers, computed by its own functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.schedules import STYLES

COUNTED_FROM_ONE = ("cosine_warmup_with_min_lr",)
"""Schedules that reach their end in the last step of the decay, not after it."""


def schedule_of_transformers(training: TrainingFlags, warmup: int, decay_steps: int) -> Callable[[int], float]:
    """Return the fraction of the peak rate at each step (from 0) from transformers' ``get_scheduler``.

    After the decay the rate stays constant.

    Args:
        warmup: number of warmup steps.
        decay_steps: number of steps of warmup and decay together.

    Raises:
        ConfigError: the warmup leaves no step for the decay, or fewer than its last part needs.
    """
    name, style = training.lr_decay_style, STYLES[training.lr_decay_style]
    options = _options(training, decay_steps)
    last = options.get("num_decay_steps", 1)
    if style.decays and warmup + last > decay_steps:
        raise ConfigError(
            f"a warmup of {warmup} steps leaves {decay_steps - warmup} to decay in, and {name} needs {last}",
            where=spelling("lr_wsd_decay_iters" if training.lr_wsd_decay_iters else "lr_decay_style"),
        )
    # transformers reads only the peak from the optimizer.
    peak = training.lr or 1.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=peak)
    scheduler: Any = get_scheduler(name, optimizer, warmup, decay_steps, scheduler_specific_kwargs=options)
    share: Callable[[int], float] = scheduler.lr_lambdas[0]
    end = decay_steps - (name in COUNTED_FROM_ONE)
    return (lambda step: share(min(step, end))) if style.decays else share


def _options(training: TrainingFlags, decay_steps: int) -> dict[str, Any]:
    """Return the options of a schedule, apart from the numbers of steps, under transformers' names."""
    floor = training.min_lr / training.lr if training.lr else 0.0
    by_name: dict[str, dict[str, Any]] = {
        "cosine_with_restarts": {"num_cycles": training.lr_num_cycles},
        "polynomial": {"lr_end": training.min_lr, "power": training.lr_power},
        "cosine_with_min_lr": {"min_lr_rate": floor},
        "cosine_warmup_with_min_lr": {"min_lr_rate": floor},
        "warmup_stable_decay": {
            "num_decay_steps": training.lr_wsd_decay_iters or math.ceil(decay_steps / 10),
            "decay_type": training.lr_wsd_decay_style,
            "min_lr_ratio": floor,
        },
    }
    return by_name.get(training.lr_decay_style, {})
