"""The device that a worker computes on, by torch's one interface to all kinds of them.

Modules outside of this one name no kind of device: they ask whether a device computes apart from the host, take
``torch.Stream`` of it, and what only a device's own module (``torch.cuda``, ``torch.xpu`` …) knows is asked here. What
an engine of another library or a kernel needs of one kind alone is a rule of its switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

HOST = torch.device("cpu")


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a worker: the host, or the accelerator of its number."""
    return HOST if kind == HOST.type else torch.device(kind, local_rank)


def is_there(kind: str) -> bool:
    """Whether torch can compute on devices of this kind here."""
    if kind == HOST.type:
        return True
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == kind


def computes_apart(device: torch.device) -> bool:
    """Whether the device computes while the host goes on: it is an accelerator."""
    return device.type != HOST.type


def make_current(device: torch.device) -> None:
    """Let this thread mean ``device`` where none is named."""
    if computes_apart(device):
        torch.accelerator.set_device_index(device.index or 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if computes_apart(device):
        torch.accelerator.synchronize(device)


def side_stream(device: torch.device) -> torch.Stream | None:
    """A stream beside the one that computes; None where the kind of device has one alone (mps)."""
    try:
        return torch.Stream(device)
    except RuntimeError:
        return None


def recorded_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """The point in a stream (by default the one that computes) that it has come to."""
    event = torch.Event(device)
    event.record(stream or torch.accelerator.current_stream(device))
    return event


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that was allocated on an accelerator so far; None where torch does not say."""
    ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if ask is None else int(ask(device))


def random_state(device: torch.device) -> torch.Tensor:
    """The state of an accelerator's generator of random numbers."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Put :func:`random_state` back."""
    torch.get_device_module(device).set_rng_state(state, device)


def current() -> torch.device | None:
    """The accelerator that this thread means where none is named; None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def in_use() -> torch.device | None:
    """As :func:`current`, but None too where this process has not begun to use it: asking must not open it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    is_open: Any = getattr(torch.get_device_module(found), "is_initialized", None) if found else None
    return None if found is None or (is_open is not None and not is_open()) else current()


def without_random_trace(tensors: Iterable[torch.Tensor]) -> Any:
    """Around what draws random numbers, on the host and on the accelerators of ``tensors``: they are put back."""
    devices = sorted({tensor.device for tensor in tensors if computes_apart(tensor.device)}, key=str)
    kind = devices[0].type if devices else "cuda"
    return torch.random.fork_rng(devices=devices, device_type=kind)


def backend_of(device: torch.device) -> str:
    """What exchanges tensors among workers: gloo for those of the host, beside it what the kind of device has."""
    if not computes_apart(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, in place: each parameter stays the object that it was, and so shared ones stay shared.

    With kinds of devices that torch itself brings it is so anyway; with those of other packages it would put new
    parameters in the place of the old ones, module by module.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or not _keeps_parameters(device))
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@cache
def _keeps_parameters(device: torch.device) -> bool:
    probe = nn.Linear(1, 1)
    weight = probe.weight
    return probe.to(device).weight is weight
