"""bitsandbytes' AdamW with 8-bit moments, in a form that checkpoints can store."""

from __future__ import annotations

from bitsandbytes.optim.adamw import AdamW8bit
from torch.optim.optimizer import StateDict


class BitsAndBytesAdamW8bit(AdamW8bit):
    """bitsandbytes' AdamW.

    It has an 8-bit code for each element of a moment, and a scale for each block of 256 elements.

    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. Parameters of fewer than
    4,096 elements keep moments in fp32.
    """

    def load_state_dict(self, state_dict: StateDict, move_to_device: bool = True) -> None:
        """Load a state as every optimizer does. The step counter becomes the plain integer that the kernels expect."""
        super().load_state_dict(state_dict, move_to_device)
        for state in self.state.values():
            state["step"] = int(state["step"])
