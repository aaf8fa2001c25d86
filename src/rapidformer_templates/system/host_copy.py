"""Copies values from the device to the host without waiting for them."""

from __future__ import annotations

import torch

from rapidformer_templates.system import accelerator


class HostCopy:
    """An asynchronous copy of a tensor in host memory. The device makes it after its queued work.

    Creating it does not wait. On a CPU it is available at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        is_asynchronous = accelerator.is_asynchronous(tensor.device)
        # Without page-locked memory the copy would wait.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=is_asynchronous)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._event = accelerator.recorded_event(tensor.device) if is_asynchronous else None

    @property
    def has_arrived(self) -> bool:
        """Whether the copy can be read without waiting."""
        return self._event is None or self._event.query()

    def values(self) -> list[float]:
        """Return the values of a one-dimensional tensor. Waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._copy.tolist()
        return values
