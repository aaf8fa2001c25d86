"""The peak memory of this process: so far, or inside a context."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from rapidformer_templates.system import accelerator

_STATUS, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_earlier_peaks: dict[torch.device, int] = {}
"""Peaks before they were reset, by device."""


@dataclass
class MemoryPeak:
    """Bytes by which the memory of a process grew at most inside a context. On a CPU both numbers are the same.

    Attributes:
        device: allocated by torch on the accelerator.
        host: resident in the process. Pages of mapped files and of imported libraries count.
    """

    device: int = 0
    host: int = 0


@contextmanager
def measured_peak(device: torch.device) -> Iterator[MemoryPeak]:
    """Measure the memory that the body of the context needs. The yielded peak is set when the context ends."""
    peak, host, on_device = MemoryPeak(), _reset_host_peak(), 0
    if accelerator.is_asynchronous(device):
        _earlier_peaks[device] = peak_bytes(device)
        on_device = accelerator.reset_peak_bytes(device)
    try:
        yield peak
    finally:
        peak.host = peak.device = max(0, _host_peak() - host)
        if accelerator.is_asynchronous(device):
            peak.device = max(0, (accelerator.peak_bytes(device) or 0) - on_device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far: allocated on the accelerator, or resident on the host."""
    allocated = accelerator.peak_bytes(device) if accelerator.is_asynchronous(device) else None
    if allocated is None:
        device, allocated = accelerator.HOST, _largest_resident()
    return max(allocated, _earlier_peaks.get(device, 0))


def _reset_host_peak() -> int:
    """Let the peak begin again, if the system can, and return the bytes that it begins with."""
    _earlier_peaks[accelerator.HOST] = peak_bytes(accelerator.HOST)
    with suppress(OSError):
        _RESET_PEAK.write_text("5")  # see proc_pid_clear_refs(5)
        return _resident("VmRSS")
    return _host_peak()


def _host_peak() -> int:
    # Linux counts the size of the process that started this one as well, but not in its status.
    return _resident("VmHWM") if _STATUS.exists() else _largest_resident()


def _largest_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident(field: str) -> int:
    return int(_STATUS.read_text(encoding="ascii").partition(f"{field}:")[2].split()[0]) * 1024
