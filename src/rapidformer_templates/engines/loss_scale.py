"""Dynamic loss scale for fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class DynamicLossScale:
    """Grows after steps without overflow, and halves on an overflow (Micikevicius et al., 2018).

    Torch's ``GradScaler`` checks the gradients on one rank. With sharded gradients, ranks would disagree. This class
    uses the global gradient norm instead, which is the same on every rank.

    Attributes:
        scale: a device scalar (fp32), so that the host need not wait for it.
    """

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32)
        self.growth_interval = growth_interval
        self._good_steps = torch.zeros((), dtype=torch.int32)

    def to(self, device: torch.device) -> None:
        """Move the scale to ``device``."""
        self.scale, self._good_steps = self.scale.to(device), self._good_steps.to(device)

    def update(self, *, overflow: bool | torch.Tensor) -> None:
        """Update the scale after a step. A tensor is 1 (fp32, on the device) for an overflow, else 0."""
        overflowed = torch.as_tensor(overflow, dtype=torch.float32, device=self.scale.device)
        torch._amp_update_scale_(self.scale, self._good_steps, overflowed, 2.0, 0.5, self.growth_interval)
        self.scale.clamp_(min=1.0)

    def state(self) -> dict[str, Any]:
        return {"scale": float(self.scale), "good_steps": int(self._good_steps)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.scale.fill_(float(state["scale"]))
        self._good_steps.fill_(int(state["good_steps"]))
