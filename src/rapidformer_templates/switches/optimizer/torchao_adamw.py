"""AdamW with moments of 8 or 4 bits, by torchao, in the form that checkpoints can keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torchao.optim import AdamW4bit, AdamW8bit

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Whether a moment has a sign."""


class _TorchAOAdamW(Optimizer):
    """What both widths share: eager updates on a CPU, and the way back from a checkpoint.

    A quantized moment goes to a checkpoint as the tensors inside of it: codes, scales and a table.
    """

    _new_buffer: Callable[[torch.Tensor, bool], torch.Tensor]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        devices = {parameter.device.type for group in self.param_groups for parameter in group["params"]}
        # torchao compiles an update for each shape; on a CPU that takes longer than short runs last.
        with torch.compiler.set_stance("force_eager") if devices == {"cpu"} else nullcontext():
            return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; entries ``moment.part`` become a quantized ``moment`` again."""
        flattened = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {index: self._assembled(flattened[index], entries) for index, entries in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})

    def _assembled(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        whole = {key: value for key, value in entries.items() if "." not in key}
        for moment, signed in MOMENTS.items():
            if f"{moment}.codes" in entries:
                whole[moment] = buffer = self._new_buffer(parameter, signed)
                for part in ("codes", "scale", "qmap"):
                    getattr(buffer, part).copy_(entries[f"{moment}.{part}"])
        return whole


class TorchAOAdamW8bit(_TorchAOAdamW, AdamW8bit):
    """A code of 8 bits for each element and a scale for each 256 (Dettmers et al., 2022).

    Parameters of fewer than 4,096 elements, or of no multiple of 256, keep moments in fp32.
    """


class TorchAOAdamW4bit(_TorchAOAdamW, AdamW4bit):
    """A code of 4 bits for each element and a scale for each 128 (Li et al., 2023).

    Parameters of fewer than 4,096 elements, or of no multiple of 128, keep moments in fp32.
    """
