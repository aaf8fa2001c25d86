"""The schedules of ``--lr-decay-style`` with their flags, and those of a DeepSpeed file. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from rapidformer_templates.planning.deepspeed_file.file import Json

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

SHAPING = tuple(dict.fromkeys(flag for style in STYLES.values() for flag in style.takes))
"""Flags that act on some schedules only."""

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


DEEPSPEED_SCHEDULES: dict[str, dict[str, float | None]] = {
    "WarmupLR": {"warmup_max_lr": None, "warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000, "total_num_steps": None},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "total_num_steps": None},
    "OneCycle": {"cycle_max_lr": None},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
}
"""DeepSpeed's schedules, with the parameters that are also flags and their defaults. None if there is no number."""

DEEPSPEED_FLAGS = {
    "warmup_max_lr": "lr",
    "cycle_max_lr": "lr",
    "lr_range_test_min_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
"""Parameters that are also flags, so that one of them can be filled from the other."""
