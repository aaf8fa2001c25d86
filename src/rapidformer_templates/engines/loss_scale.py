"""Dynamic loss scale for fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DynamicLossScale:
    """Grows after steps without overflow and halves on one (Micikevicius et al., 2018).

    torch's ``GradScaler`` looks for overflow in the gradients that a rank holds; where they are
    sharded, ranks would disagree. Here the global gradient norm decides, which is the same everywhere.
    """

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self._good_steps = 0

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self.scale, self._good_steps = max(1.0, self.scale / 2), 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale, self._good_steps = self.scale * 2, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
