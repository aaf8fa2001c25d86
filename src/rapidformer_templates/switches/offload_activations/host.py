"""Page-locked host memory for an accelerator, and the streams that copy to and from it during computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rapidformer_templates.system import accelerator

Wait = Callable[[], None]
"""Makes later work on the device wait for a copy. The host does not wait."""


class Host(Protocol):
    """Where kept tensors go."""

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[object], Wait]:
        """Start to copy device tensors. Return the copies, and the wait that must precede freeing the tensors."""

    def fetch(self, copies: Sequence[Any]) -> tuple[list[torch.Tensor], Wait]:
        """Start to copy tensors back. Return device tensors, and the wait that must precede reading or freeing them."""


class PinnedMemory:
    """Page-locked host memory for an accelerator.

    Each direction has a separate stream. A copy starts when the device has finished all work queued before it, and
    overlaps with work queued after it. The compute stream allocates and frees device memory. It must wait for a
    copy before it frees memory that the copy reads or writes.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Wait]:
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        return copies, self._copy(self._out, copies, tensors)

    def fetch(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Wait]:
        tensors = [torch.empty(copy.shape, dtype=copy.dtype, device=self._device) for copy in copies]
        return tensors, self._copy(self._back, tensors, copies)

    def _copy(self, stream: torch.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Wait:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = accelerator.recorded_event(self._device, stream)
        return lambda: torch.accelerator.current_stream(self._device).wait_event(copied)
