"""The schedules of ``--lr-decay-style``, and the flags that each of them takes. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rapidformer_templates.planning.flags import TrainingFlags

END = ("min_lr", "lr_decay_iters")


@dataclass(frozen=True)
class Style:
    """What the rules and the run know of a schedule.

    Attributes:
        takes: the flags that act on it, beside those of the warmup.
        of_transformers: whether transformers' function of that name draws it, to the letter. Its warmup begins at a
            rate of zero; the library's own three take their first step at a share of the peak.
    """

    takes: tuple[str, ...] = ()
    of_transformers: bool = True

    @property
    def decays(self) -> bool:
        """Whether it comes to an end, after which the rate stays."""
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
"""The flags that act on some schedules only, with their defaults."""

WARMUPS = ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples")
"""The flags of which one may say how long the warmup is."""

OF_SCHEDULES = ("lr_decay_style", *SHAPING, *WARMUPS)
"""Every flag of the library's schedules."""


def warmup_steps(training: TrainingFlags, global_batch: int, decay_steps: int | None) -> tuple[int | None, str]:
    """(steps of warmup, the flag that says so).

    Args:
        training: the flags.
        global_batch: samples a step.
        decay_steps: steps over which the rate decays; None where they are not known.

    Returns:
        None in place of the steps where they are a share of steps that are not known.
    """
    if training.lr_warmup_fraction is not None:
        return decay_steps and math.ceil(training.lr_warmup_fraction * decay_steps), "lr_warmup_fraction"
    if training.lr_warmup_samples is not None:
        return -(-training.lr_warmup_samples // global_batch), "lr_warmup_samples"
    return training.lr_warmup_iters or 0, "lr_warmup_iters"
