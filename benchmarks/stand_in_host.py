"""A simulated host for runs on a CPU, with separate memory and with copies that happen as late as possible."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from rapidformer_templates.planning.registry import Registry
from rapidformer_templates.planning.switch import Request, Rule
from rapidformer_templates.switches.offload_activations.transform import MIN_BYTES, Wait

ROOM = "rapidformer_templates.switches.offload_activations"


class StandInHost:
    """Copies bytes to numpy arrays, which are not torch storages. The copy happens only when its result is waited for.

    Until then, fetched tensors contain garbage. Freeing a tensor before waiting for its copy fails an assertion.

    Attributes:
        journal: All operations in order, each with its number of bytes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.journal: list[tuple[str, int]] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Wait]:
        copies = [(tensor.dtype, np.zeros(tensor.nbytes, np.uint8)) for tensor in tensors]
        return copies, self._later("send", "sent", tensors, copies)

    def fetch(self, copies: Sequence[Any]) -> tuple[list[torch.Tensor], Wait]:
        tensors = [torch.full((copy.nbytes,), 0xA5, dtype=torch.uint8).view(dtype) for dtype, copy in copies]
        return tensors, self._later("fetch", "back", tensors, copies)

    def _later(self, begun: str, done: str, tensors: Sequence[torch.Tensor], copies: Sequence[Any]) -> Wait:
        held = [weakref.ref(tensor) for tensor in tensors]
        size = sum(copy.nbytes for _, copy in copies)
        self.journal.append((begun, size))

        def wait() -> None:
            for reference, (_, copy) in zip(held, copies, strict=True):
                tensor = reference()
                assert tensor is not None, f"the tensor was freed before it was {done}"
                here = tensor.detach().view(torch.uint8).numpy()
                (copy if done == "sent" else here)[:] = here if done == "sent" else copy
            self.journal.append((done, size))

        return wait


@contextmanager
def taken_for_a_gpu(least_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Let runs on a CPU offload to simulated hosts."""
    consulted = Registry.consulted

    def without_the_device(self: Registry, request: Request) -> tuple[Rule, ...]:
        return tuple(rule for rule in consulted(self, request) if rule.code != "RF215")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Registry, "consulted", without_the_device))
        stack.enter_context(mock.patch(f"{ROOM}.transform.PinnedMemory", StandInHost))
        stack.enter_context(mock.patch(f"{ROOM}.transform.MIN_BYTES", least_bytes))
        yield
