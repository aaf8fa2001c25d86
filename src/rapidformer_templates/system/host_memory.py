"""Host memory for training on a CPU: keep freed activations and gradients for the next step, or return them."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # <malloc.h>


def freed_memory() -> str:
    """Return what happens to freed memory: ``kept``, ``given back`` or ``as usual``, by the allocator's settings."""
    if M_MMAP_MAX in _changed:
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


def use_default_allocator() -> None:
    """Undo both settings: use the thresholds of a fresh process and return kept memory now.

    Does nothing if neither was set.
    """
    if _changed:
        _mallopt({M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: 2**17, M_MMAP_THRESHOLD: 2**17})
        ctypes.CDLL(None).malloc_trim(0)
        _changed.clear()


_changed: set[int] = set()
"""Options that this process has set."""


def _mallopt(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in values.items():
            if mallopt(option, value):
                _changed.add(option)
