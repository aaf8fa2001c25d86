"""DeepSpeed's fixed or dynamic loss scale under fp16, in the format of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def state_of(scaler: Any) -> dict[str, Any]:
    """Return the state that a checkpoint must store."""
    state = {"scale": float(scaler.cur_scale), "good_steps": 0}
    if scaler.dynamic:
        state["good_steps"] = scaler.cur_iter - scaler.last_overflow_iter - 1
        state["hysteresis"] = scaler.cur_hysteresis
    return state


def restore(scaler: Any, saved: Mapping[str, Any]) -> None:
    """Restore the state of a checkpoint. A fixed scale does not change."""
    if not scaler.dynamic:
        return
    scaler.cur_scale = float(saved["scale"])
    scaler.last_overflow_iter = scaler.cur_iter - int(saved["good_steps"]) - 1
    scaler.cur_hysteresis = min(int(saved.get("hysteresis", scaler.delayed_shift)), scaler.delayed_shift)
