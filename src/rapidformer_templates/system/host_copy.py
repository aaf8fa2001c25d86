"""Values of the device on their way to the host, without waiting for them."""

from __future__ import annotations

import torch

from rapidformer_templates.system import accelerator


class HostCopy:
    """A copy of a tensor in host memory, made behind what the device has to do before it.

    Making one waits for nothing. On a CPU it is there at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        apart = accelerator.computes_apart(tensor.device)
        # Without page-locked memory the copy would wait.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=apart)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._event = accelerator.recorded_event(tensor.device) if apart else None

    @property
    def has_arrived(self) -> bool:
        """Whether it can be read without waiting."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """The values of a one-dimensional tensor; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._copy.tolist()
        return values
