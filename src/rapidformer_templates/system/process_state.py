"""The state of a process: what a training changes (random numbers, the allocator, the environment), and peak memory."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rapidformer_templates.system import accelerator

ENVIRONMENT = ("TOKENIZERS_PARALLELISM", "LOCAL_RANK")
"""Environment variables that a training sets."""


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the host and of the current device.

    It takes a few microseconds. ``torch.manual_seed`` takes 0.3 ms if a device that torch supports is not in use,
    because it records a stack trace for each.
    """
    torch.default_generator.manual_seed(seed)
    device = accelerator.in_use()
    if device is not None:
        torch.get_device_module(device).manual_seed(seed)


def capture() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the state as (tensors, text) for :func:`restore`."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    device = accelerator.current()
    if device is not None:
        tensors[device.type] = accelerator.random_state(device)
    text = {
        "python": json.dumps([version, gauss]),
        "numpy": json.dumps([str(kind), int(position), int(has_gauss), float(cached)]),
    }
    return tensors, text


def restore(tensors: dict[str, torch.Tensor], text: dict[str, str]) -> None:
    """Restore a state from :func:`capture`, for the devices of this machine."""
    version, gauss = json.loads(text["python"])
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = json.loads(text["numpy"])
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    device = accelerator.current()
    if device is not None and device.type in tensors:
        accelerator.set_random_state(device, tensors[device.type])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators inside the context and restore their previous states after it."""
    before = capture()
    seed_all(seed)
    try:
        yield
    finally:
        restore(*before)


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore random states, matmul precision, environment and allocator after the context.

    The allocator gets the settings of a fresh process.
    """
    random_state, precision = capture(), torch.get_float32_matmul_precision()
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    try:
        yield
    finally:
        restore(*random_state)
        torch.set_float32_matmul_precision(precision)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        use_default_allocator()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # <malloc.h>


def freed_memory() -> str:
    """Return what happens to freed memory: ``kept``, ``given back`` or ``as usual``, by the allocator's settings."""
    if _changed.get(M_MMAP_MAX) == 0:
        return "kept"
    return "given back" if _changed else "as usual"


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory instead of returning it to the system.

    By default every large tensor is a separate mapping, and each step pays for its pages again. Keeping memory saves
    half of the page faults of a step. In return the process stays at its peak size. See mallopt(3). Other allocators
    and systems are not changed.
    """
    _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


def give_freed_memory_back() -> None:
    """Make glibc's allocator return every tensor of a megabyte or more to the system when it is freed.

    By default the allocator raises that threshold to 32 MB. Shards that are allocated and freed between full parameters
    then leave holes. ZeRO-3 with offload needed 4.2 GB for 2.5 GB of data. With the lower threshold each new tensor
    pays for its pages, so a step takes longer.
    """
    _mallopt({M_MMAP_THRESHOLD: 2**20})


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Return every freed tensor of a megabyte or more to the system, until this context ends."""
    before = dict(_changed)
    _mallopt({M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: min(2**20, before.get(M_MMAP_THRESHOLD, 2**20))})
    try:
        yield
    finally:
        use_default_allocator()
        if before:
            _mallopt(before)
        else:  # glibc raises its thresholds to these values when large tensors are freed, unless they have been set
            _mallopt({M_MMAP_THRESHOLD: 2**25, M_TRIM_THRESHOLD: 2**26})
            _changed.clear()


def use_default_allocator() -> None:
    """Undo both settings: use the thresholds of a fresh process and return kept memory now.

    Does nothing if neither was set.
    """
    if _changed:
        _mallopt({M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: 2**17, M_MMAP_THRESHOLD: 2**17})
        return_freed_memory()
        _changed.clear()


def return_freed_memory() -> None:
    """Return the memory that glibc's allocator keeps at the moment to the system, also between tensors in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


_changed: dict[int, int] = {}
"""Options that this process has set, with their values."""


def _mallopt(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        _changed.update({option: value for option, value in values.items() if mallopt(option, value)})


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
    peak, on_device = MemoryPeak(), 0
    _earlier_peaks[accelerator.HOST] = peak_bytes(accelerator.HOST)
    try:  # let the peak of the host begin again, if the system can
        _RESET_PEAK.write_text("5")  # see proc_pid_clear_refs(5)
        host = resident_bytes("VmRSS")
    except OSError:
        host = resident_bytes("VmHWM")
    if accelerator.is_asynchronous(device):
        _earlier_peaks[device] = peak_bytes(device)
        on_device = accelerator.reset_peak_bytes(device)
    try:
        yield peak
    finally:
        peak.host = peak.device = max(0, resident_bytes("VmHWM") - host)
        if accelerator.is_asynchronous(device):
            peak.device = max(0, (accelerator.peak_bytes(device) or 0) - on_device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far: allocated on the accelerator, or resident on the host."""
    allocated = accelerator.peak_bytes(device) if accelerator.is_asynchronous(device) else None
    if allocated is None:
        device, allocated = accelerator.HOST, _largest_resident()
    return max(allocated, _earlier_peaks.get(device, 0))


def resident_bytes(field: Literal["VmHWM", "VmRSS"]) -> int:
    """Return the peak (``VmHWM``) or current (``VmRSS``) memory of this process. Not all systems tell the latter."""
    with suppress(OSError):
        if words := _STATUS.read_text(encoding="ascii").partition(f"{field}:")[2].split(maxsplit=1):
            return int(words[0]) * 1024
    return _largest_resident()


def _largest_resident() -> int:
    # On Linux it includes the size of the process that started this one. The status does not.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
