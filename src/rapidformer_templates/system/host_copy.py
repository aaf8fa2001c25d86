"""Values of the device on their way to the host, without waiting for them."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor in host memory, made behind what the device has to do before it.

    Making one waits for nothing. On a CPU it is there at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # On a GPU torch takes page-locked memory for it, without which the copy would wait.
        self._copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

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
