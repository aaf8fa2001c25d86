"""The learning-rate schedules of a DeepSpeed file, with DeepSpeed's own formulas. Does not import torch.

DeepSpeed sets the first rate when it builds a schedule, and advances it after each update. So update ``s`` (from 0) has
the rate of iteration ``s - 1``, and iteration -1 is the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

AUTO = "auto"

PARAMETERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}
"""The schedules with their parameters and DeepSpeed's defaults. None if there is no default number."""

NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

FLAGS = {
    "warmup_max_lr": "lr",
    "cycle_max_lr": "lr",
    "lr_range_test_min_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
"""Parameters that are also flags, so that one of them can be filled from the other."""

Rate = Callable[[int], float]
"""Returns the learning rate of an iteration."""


def rates(kind: str, parameters: Mapping[str, Any], *, lr: float, warmup: int, total: int) -> Rate:
    """Return a function that maps an update, counted from 0, to its learning rate.

    Args:
        kind: a name of :data:`PARAMETERS`.
        parameters: the parameters. Missing ones have DeepSpeed's defaults.
        lr: the peak if it is ``"auto"`` or left to the optimizer.
        warmup, total: the numbers of steps that replace ``"auto"``.
    """
    automatic = {"warmup_max_lr": lr, "warmup_num_steps": max(1, warmup), "total_num_steps": total, "cycle_max_lr": lr}
    p = dict(PARAMETERS[kind])
    p |= {name: value for name, value in parameters.items() if value != AUTO}
    p |= {name: automatic[name] for name, value in parameters.items() if value == AUTO and name in automatic}
    if kind == "WarmupLR" and p["warmup_max_lr"] is None:
        p["warmup_max_lr"] = lr
    at = {
        "WarmupLR": lambda: _warmup(p),
        "WarmupDecayLR": lambda: _warmup(p),
        "WarmupCosineLR": lambda: _cosine(p, lr),
        "OneCycle": lambda: _one_cycle(p),
        "LRRangeTest": lambda: _range_test(p),
    }[kind]()
    return lambda update: at(update - 1)


def _risen(p: Mapping[str, Any], iteration: int, steps: int) -> float:
    """Return the progress of a warmup as a fraction."""
    if p["warmup_type"] == "linear":
        return iteration / steps
    return math.log(iteration + 1) / math.log(steps)


def _warmup(p: Mapping[str, Any]) -> Rate:
    low, high, steps = p["warmup_min_lr"], p["warmup_max_lr"], max(2, int(p["warmup_num_steps"]))
    total = p.get("total_num_steps")

    def rate(iteration: int) -> float:
        if iteration < 0:
            return float(low)
        share = 1.0
        if iteration < steps:
            share = _risen(p, iteration, steps)
        elif total is not None:
            share = max(0.0, (total - iteration) / max(1.0, total - steps))
        return float(low + (high - low) * share)

    return rate


def _cosine(p: Mapping[str, Any], lr: float) -> Rate:
    steps, total = max(2, int(p["warmup_num_steps"])), p["total_num_steps"]
    lowest, end = p["warmup_min_ratio"], p["cos_min_ratio"]

    def rate(iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return float(lr * (lowest + _risen(p, iteration, steps) * (1.0 - lowest)))
        progress = min(1.0, (iteration - steps + 1) / max(1, total - steps))
        return float(lr * max(0.0, end + (1.0 - end) * (1 + math.cos(math.pi * progress)) / 2))

    return rate


def _one_cycle(p: Mapping[str, Any]) -> Rate:
    low, high = p["cycle_min_lr"], p["cycle_max_lr"]
    up = float(p["cycle_first_step_size"])
    down = up if p["cycle_second_step_size"] is None else float(p["cycle_second_step_size"])
    stairs_up = p["cycle_first_stair_count"]
    stairs_down = stairs_up if p["cycle_second_stair_count"] is None else p["cycle_second_stair_count"]
    whole = up + down

    def height(position: float) -> float:
        """Return the height, from 0 to 1, at a position in the cycle, in updates from its start."""
        rises = position <= up
        done, of, stairs = (position, up, stairs_up) if rises else (whole - position, down, stairs_down)
        return math.floor(done * stairs / of) / stairs if stairs > 0 else done / of

    def rate(iteration: int) -> float:
        if iteration < 0:
            return float(low)
        if iteration < whole:
            return float(low + (high - low) * height((iteration + 1) % whole))
        if p["decay_step_size"] == 0 or p["decay_lr_rate"] == 0:
            return float(low)
        return float(low / (1 + p["decay_lr_rate"] * (iteration - whole + 1) / p["decay_step_size"]))

    return rate


def _range_test(p: Mapping[str, Any]) -> Rate:
    def rate(iteration: int) -> float:
        done = (iteration + 1) / p["lr_range_test_step_size"]
        done = math.floor(done) if p["lr_range_test_staircase"] else done
        return float(p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * done))

    return rate
