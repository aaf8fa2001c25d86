"""The device of a worker, through torch's interface for all kinds of accelerators.

Other modules do not name a kind of device. They ask whether a device is asynchronous to the host, and use
``torch.Stream``. Everything that only a device's own module (``torch.cuda``, ``torch.xpu`` …) offers is wrapped here.
If an engine of another library or a kernel needs one kind of device, that is a rule of its switch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.errors import ConfigError, counted
from rapidformer_templates.system.processes import LAUNCHER

HOST = torch.device("cpu")


def device_of(kind: str, local_rank: int) -> torch.device:
    """Return the device of a worker: the host, or the accelerator with its local rank.

    If a process sees a single device, because its scheduler shows each process another one, it takes that device.

    Raises:
        ConfigError: this machine has more workers than devices.
    """
    if kind == HOST.type:
        return HOST
    devices = torch.accelerator.device_count()
    has_its_own = devices == 1 and LAUNCHER not in os.environ  # our launcher shows all devices to all workers
    if not has_its_own and 0 < devices <= local_rank:
        raise ConfigError(
            f"worker {local_rank} of this machine has no {kind} device: {counted(devices, 'device')} can be seen",
            where="LOCAL_RANK",
            hint=f"start at most {counted(devices, 'worker')} on a machine, or make more devices visible",
        )
    return torch.device(kind, 0 if has_its_own else local_rank)


def is_available(kind: str) -> bool:
    """Return whether torch can compute on this kind of device on this machine."""
    if kind == HOST.type:
        return True
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type == kind


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the device computes asynchronously to the host, that is, whether it is an accelerator."""
    return device.type != HOST.type


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed its queued work."""
    if is_asynchronous(device):
        torch.accelerator.synchronize(device)


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return a second stream next to the compute stream. None if the device has only one stream (mps)."""
    try:
        return torch.Stream(device)
    except RuntimeError:
        return None


def recorded_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Record an event on a stream, by default the compute stream."""
    event = torch.Event(device)
    event.record(stream or torch.accelerator.current_stream(device))
    return event


class HostCopy:
    """An asynchronous copy of a tensor in host memory. The device makes it after its queued work.

    Creating it does not wait. On a CPU it is available at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        has_to_arrive = is_asynchronous(tensor.device)
        # Without page-locked memory the copy would wait.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=has_to_arrive)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._event = recorded_event(tensor.device) if has_to_arrive else None

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


def sent(values: object, device: torch.device) -> torch.Tensor:
    """Return a tensor of numbers of the host on a device. The host does not wait for the copy."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if is_asynchronous(device) else tensor


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory allocated on an accelerator so far, or None if torch does not report it."""
    ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if ask is None else int(ask(device))


def reset_peak_bytes(device: torch.device) -> int:
    """Let :func:`peak_bytes` begin again, if torch can. Return the bytes that are allocated now."""
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return peak_bytes(device) or 0
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of an accelerator's random number generator."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore a state from :func:`random_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def current() -> torch.device | None:
    """Return the current accelerator of this thread, or None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.device(device.type, torch.accelerator.current_device_index())


def in_use() -> torch.device | None:
    """Return the same as :func:`current`, or None if this process has not used it yet. This never initializes it."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    is_open: Callable[[], bool] | None = getattr(torch.get_device_module(device), "is_initialized", None)
    return current() if is_open is None or is_open() else None


def without_random_trace(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Restore the random states of the host and of the accelerators of ``tensors`` after the context."""
    devices = sorted({tensor.device for tensor in tensors if is_asynchronous(tensor.device)}, key=str)
    kind = devices[0].type if devices else "cuda"
    return torch.random.fork_rng(devices=devices, device_type=kind)


def backend_of(device: torch.device) -> str:
    """Return the backend of collectives: gloo for host tensors, and for an accelerator also its own backend."""
    if not is_asynchronous(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device in place. Parameters stay the same objects, so shared ones stay shared.

    torch does this for its own kinds of devices. For those of other packages it would create new parameters, separately
    in each module.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps_parameters(device))
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def swaps_parameters(device: torch.device) -> bool:
    """Return whether a move to the device swaps the parameters' contents, which weak references to them forbid."""
    return torch.__future__.get_swap_module_params_on_conversion() or not _keeps_parameters(device)


@cache
def _keeps_parameters(device: torch.device) -> bool:
    probe = nn.Linear(1, 1)
    weight = probe.weight
    return probe.to(device).weight is weight
