"""AdamW with moments of 8 bits, by bitsandbytes, in the form that checkpoints can keep."""

from __future__ import annotations

from typing import Any

from bitsandbytes.optim.adamw import AdamW8bit


class BitsAndBytesAdamW8bit(AdamW8bit):
    """bitsandbytes' AdamW: a code of 8 bits for each element of a moment and a scale for each 256 of them.

    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. Parameters of fewer than
    4,096 elements keep moments in fp32.
    """

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """As every optimizer's; the count of steps becomes the plain integer that the kernels take."""
        super().load_state_dict(state_dict, move_to_device)
        for state in self.state.values():
            state["step"] = int(state["step"])
