"""torchao's AdamW with 8-bit or 4-bit moments, in a form that checkpoints can store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict
from torchao.optim import AdamW4bit, AdamW8bit

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Whether a moment is signed."""


class _TorchAOAdamW(Optimizer):
    """Common code of both widths: eager updates on a CPU, and loading from a checkpoint.

    A checkpoint stores a quantized moment as the tensors inside it: codes, scales and a table.
    """

    _new_buffer: Callable[[torch.Tensor, bool], torch.Tensor]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        devices = {parameter.device.type for group in self.param_groups for parameter in group["params"]}
        # torchao compiles an update for each shape. On a CPU that takes longer than a short run.
        with torch.compiler.set_stance("force_eager") if devices == {"cpu"} else nullcontext():
            return super().step(closure)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state as every optimizer does. Entries ``moment.part`` become a quantized ``moment`` again."""
        flattened = [parameter for group in self.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, entries in state_dict["state"].items():
            state[index] = {key: value for key, value in entries.items() if "." not in key}
            for moment, signed in MOMENTS.items():
                if f"{moment}.codes" in entries:
                    state[index][moment] = buffer = self._new_buffer(flattened[index], signed)
                    for part in ("codes", "scale", "qmap"):
                        getattr(buffer, part).copy_(entries[f"{moment}.{part}"])
        super().load_state_dict({**state_dict, "state": state})


class TorchAOAdamW8bit(_TorchAOAdamW, AdamW8bit):
    """AdamW with an 8-bit code per element and a scale per 256 elements (Dettmers et al., 2022).

    Parameters keep moments in fp32 if they have fewer than 4,096 elements or not a multiple of 256.
    """


class TorchAOAdamW4bit(_TorchAOAdamW, AdamW4bit):
    """AdamW with a 4-bit code per element and a scale per 128 elements (Li et al., 2023).

    Parameters keep moments in fp32 if they have fewer than 4,096 elements or not a multiple of 128.
    """
