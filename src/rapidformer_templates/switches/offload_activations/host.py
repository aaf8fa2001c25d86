"""Page-locked host memory of an accelerator, and the streams that copy to it and from it beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rapidformer_templates.system import accelerator

Wait = Callable[[], None]
"""Lets what the device computes from now on wait for a copy; the host does not wait."""


class Host(Protocol):
    """Where kept tensors go."""

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Wait]:
        """Begin to copy tensors of the device: the copies, and what to wait for before the tensors are let go."""

    def fetch(self, copies: Sequence[Any]) -> tuple[list[torch.Tensor], Wait]:
        """Begin to bring copies back: tensors of the device, and what to wait for before they are read or let go."""


class PinnedMemory:
    """The host memory of an accelerator.

    Each direction has a stream of its own. A copy begins when the device has done what it was given before, and
    runs beside what it is given after. Memory on the device is taken and given back by the stream that computes,
    which must wait for a copy before it gives back what the copy reads or writes.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Wait]:
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        return copies, self._copy(self._out, copies, tensors)

    def fetch(self, copies: Sequence[Any]) -> tuple[list[torch.Tensor], Wait]:
        tensors = [torch.empty(copy.shape, dtype=copy.dtype, device=self._device) for copy in copies]
        return tensors, self._copy(self._back, tensors, copies)

    def _copy(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Wait:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = accelerator.recorded_event(self._device, stream)
        return lambda: torch.accelerator.current_stream(self._device).wait_event(copied)
