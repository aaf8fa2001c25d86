"""The schedules of ``--lr-decay-style`` with their flags, and those of a DeepSpeed file. Does not import torch.

DeepSpeed sets the first rate when it builds a schedule, and advances it after each update. So update ``s`` (from 0) has
the rate of iteration ``s - 1``, and iteration -1 is the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from rapidformer_templates.planning.deepspeed_file.file import AUTO, Json

if TYPE_CHECKING:
    from rapidformer_templates.planning.flags import TrainingFlags

END = ("min_lr", "lr_decay_iters")


@dataclass(frozen=True)
class Style:
    """Facts about a schedule, for the rules and the run.

    Attributes:
        takes: the flags that act on it, other than those of the warmup.
        of_transformers: whether it is exactly transformers' function with that name. Its warmup begins at a rate of
            zero. The library's own three schedules take their first step at a fraction of the peak.
    """

    takes: tuple[str, ...] = ()
    of_transformers: bool = True

    @property
    def decays(self) -> bool:
        """Whether the decay ends, after which the rate is constant."""
        return "lr_decay_iters" in self.takes


STYLES = {
    "linear": Style(END, of_transformers=False),
    "cosine": Style(END, of_transformers=False),
    "constant": Style(of_transformers=False),
    "cosine_with_restarts": Style(("lr_decay_iters", "lr_num_cycles")),
    "polynomial": Style((*END, "lr_power")),
    "constant_with_warmup": Style(),
    "inverse_sqrt": Style(),
    "cosine_with_min_lr": Style(END),
    "cosine_warmup_with_min_lr": Style(END),
    "warmup_stable_decay": Style((*END, "lr_wsd_decay_iters", "lr_wsd_decay_style")),
}

SHAPING = {
    "min_lr": 0.0,
    "lr_decay_iters": None,
    "lr_num_cycles": 1,
    "lr_power": 1.0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_style": "cosine",
}
"""Flags that act on some schedules only, with their defaults."""

WARMUPS = ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples")
"""Flags for the length of the warmup. Only one of them may be given."""

OF_SCHEDULES = ("lr_decay_style", *SHAPING, *WARMUPS)
"""All flags of the library's schedules."""


def warmup_steps(training: TrainingFlags, global_batch: int, decay_steps: int | None) -> tuple[int | None, str]:
    """Return (number of warmup steps, the flag that sets it).

    Args:
        training: the flags.
        global_batch: number of samples per step.
        decay_steps: number of steps over which the rate decays, or None if unknown.

    Returns:
        None instead of the number if it is a fraction of an unknown number of steps.
    """
    if training.lr_warmup_fraction is not None:
        return decay_steps and math.ceil(training.lr_warmup_fraction * decay_steps), "lr_warmup_fraction"
    if training.lr_warmup_samples is not None:
        return -(-training.lr_warmup_samples // global_batch), "lr_warmup_samples"
    return training.lr_warmup_iters or 0, "lr_warmup_iters"


class FileSchedule(TypedDict):
    """The schedule of a file: a class of DeepSpeed, and its parameters."""

    type: str
    params: dict[str, Json]


DEEPSPEED_PARAMETERS: dict[str, dict[str, float | str | None]] = {
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
"""DeepSpeed's schedules with their parameters and defaults. None if there is no default number."""

DEEPSPEED_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

DEEPSPEED_FLAGS = {
    "warmup_max_lr": "lr",
    "cycle_max_lr": "lr",
    "lr_range_test_min_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
"""Parameters that are also flags, so that one of them can be filled from the other."""

Parameters = Mapping[str, Any]
"""Numbers by name, checked by RF103, and the type of the warmup."""


def deepspeed_rates(schedule: FileSchedule, *, lr: float, warmup: int, total: int) -> Callable[[int], float]:
    """Return a function that maps an update, counted from 0, to its learning rate.

    Args:
        schedule: a schedule without mistakes. Missing parameters have DeepSpeed's defaults.
        lr: the peak if it is ``"auto"`` or left to the optimizer.
        warmup, total: the numbers of steps that replace ``"auto"``.
    """
    automatic = {"warmup_max_lr": lr, "warmup_num_steps": max(1, warmup), "total_num_steps": total, "cycle_max_lr": lr}
    kind = schedule["type"]
    p: dict[str, Json] = {**DEEPSPEED_PARAMETERS[kind], "lr": lr}
    for name, value in schedule["params"].items():
        if value != AUTO or name in automatic:
            p[name] = automatic[name] if value == AUTO else value
    if kind == "WarmupLR" and p["warmup_max_lr"] is None:
        p["warmup_max_lr"] = lr
    formula = DEEPSPEED_FORMULAS[kind]
    return lambda update: formula(p, update - 1)


def _warmup_fraction(p: Parameters, iteration: int, steps: int) -> float:
    if p["warmup_type"] == "linear":
        return iteration / steps
    return math.log(iteration + 1) / math.log(steps)


def warmup_rate(p: Parameters, iteration: int) -> float:
    """Return the rate of WarmupLR and WarmupDecayLR: a warmup, then a constant rate or a linear decay."""
    low, high, steps = p["warmup_min_lr"], p["warmup_max_lr"], max(2, int(p["warmup_num_steps"]))
    total = p.get("total_num_steps")
    if iteration < 0:
        return float(low)
    fraction = 1.0
    if iteration < steps:
        fraction = _warmup_fraction(p, iteration, steps)
    elif total is not None:
        fraction = max(0.0, (total - iteration) / max(1.0, total - steps))
    return float(low + (high - low) * fraction)


def cosine_rate(p: Parameters, iteration: int) -> float:
    """Return the rate of WarmupCosineLR: a warmup, then a cosine."""
    lr, steps, total = p["lr"], max(2, int(p["warmup_num_steps"])), p["total_num_steps"]
    lowest, end = p["warmup_min_ratio"], p["cos_min_ratio"]
    if iteration < 0:
        return 0.0
    if iteration < steps:
        return float(lr * (lowest + _warmup_fraction(p, iteration, steps) * (1.0 - lowest)))
    progress = min(1.0, (iteration - steps + 1) / max(1, total - steps))
    return float(lr * max(0.0, end + (1.0 - end) * (1 + math.cos(math.pi * progress)) / 2))


def one_cycle_rate(p: Parameters, iteration: int) -> float:
    """Return the rate of OneCycle: up, down, and then a slow decay. It can move in stairs."""
    low, high = p["cycle_min_lr"], p["cycle_max_lr"]
    up = float(p["cycle_first_step_size"])
    down = up if p["cycle_second_step_size"] is None else float(p["cycle_second_step_size"])
    stairs_up = p["cycle_first_stair_count"]
    stairs_down = stairs_up if p["cycle_second_stair_count"] is None else p["cycle_second_stair_count"]
    whole = up + down
    if 0 <= iteration < whole:
        position = (iteration + 1) % whole  # in updates from the start of the cycle
        rises = position <= up
        done, steps, stairs = (position, up, stairs_up) if rises else (whole - position, down, stairs_down)
        height = math.floor(done * stairs / steps) / stairs if stairs > 0 else done / steps
        return float(low + (high - low) * height)
    if iteration < 0 or p["decay_step_size"] == 0 or p["decay_lr_rate"] == 0:
        return float(low)
    return float(low / (1 + p["decay_lr_rate"] * (iteration - whole + 1) / p["decay_step_size"]))


def range_test_rate(p: Parameters, iteration: int) -> float:
    """Return the rate of LRRangeTest, which rises without an end."""
    steps = (iteration + 1) / p["lr_range_test_step_size"]
    steps = math.floor(steps) if p["lr_range_test_staircase"] else steps
    return float(p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * steps))


DEEPSPEED_FORMULAS: Mapping[str, Callable[[Parameters, int], float]] = {
    "WarmupLR": warmup_rate,
    "WarmupDecayLR": warmup_rate,
    "WarmupCosineLR": cosine_rate,
    "OneCycle": one_cycle_rate,
    "LRRangeTest": range_test_rate,
}
"""The rate of an iteration. DeepSpeed's own classes round the last digit of some rates otherwise."""
