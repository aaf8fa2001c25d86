"""The loss scale that DeepSpeed keeps under fp16, fixed or dynamic, in the words of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def state_of(scaler: Any) -> dict[str, Any]:
    """What must be kept of it."""
    state = {"scale": float(scaler.cur_scale), "good_steps": 0}
    if scaler.dynamic:
        state["good_steps"] = scaler.cur_iter - scaler.last_overflow_iter - 1
        state["hysteresis"] = scaler.cur_hysteresis
    return state


def restore(scaler: Any, saved: Mapping[str, Any]) -> None:
    """Go on with what another run has kept; a fixed scale stays as it is."""
    if not scaler.dynamic:
        return
    scaler.cur_scale = float(saved["scale"])
    scaler.last_overflow_iter = scaler.cur_iter - int(saved["good_steps"]) - 1
    scaler.cur_hysteresis = min(int(saved.get("hysteresis", scaler.delayed_shift)), scaler.delayed_shift)
