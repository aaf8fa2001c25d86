"""Dynamic loss scale for fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class DynamicLossScale:
    """Grows after steps without overflow and halves on one (Micikevicius et al., 2018).

    torch's ``GradScaler`` looks for overflow in the gradients that a rank holds; where they are
    sharded, ranks would disagree. Here the global gradient norm decides, which is the same everywhere.

    Attributes:
        scale: a number on the device (fp32), so that nobody waits for it.
    """

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32)
        self.growth_interval = growth_interval
        self._good_steps = torch.zeros((), dtype=torch.int32)

    def to(self, device: torch.device) -> None:
        """Keep it on ``device``."""
        self.scale, self._good_steps = self.scale.to(device), self._good_steps.to(device)

    def update(self, *, overflow: bool | torch.Tensor) -> None:
        """Take note of a step; a tensor is 1 (fp32, on the device) for an overflow, else 0."""
        overflowed = torch.as_tensor(overflow, dtype=torch.float32, device=self.scale.device)
        torch._amp_update_scale_(self.scale, self._good_steps, overflowed, 2.0, 0.5, self.growth_interval)
        self.scale.clamp_(min=1.0)

    def state(self) -> dict[str, Any]:
        return {"scale": float(self.scale), "good_steps": int(self._good_steps)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.scale.fill_(float(state["scale"]))
        self._good_steps.fill_(int(state["good_steps"]))
