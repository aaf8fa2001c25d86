"""Host memory for training on a CPU: freed activations and gradients are kept for the next step, or given back."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # <malloc.h>


def freed_memory() -> str:
    """What becomes of it in this process: ``kept``, ``given back`` or ``as usual``, by what the allocator has taken."""
    if M_MMAP_MAX in _changed:
        return "kept"
    return "given back" if _changed else "as usual"


def keep_freed_memory() -> None:
    """Have glibc's allocator keep what is freed instead of giving it back to the system.

    By default every large tensor is a mapping of its own, and each step pays for its pages again;
    half of the page faults of a step are saved by this, at the cost of a process that stays as large
    as it once was. See mallopt(3); other allocators and systems are left alone.
    """
    _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


def give_freed_memory_back() -> None:
    """Have glibc's allocator give every tensor of a megabyte back to the system when it is freed.

    By default it raises that bound to 32 MB by itself, and shards that are made and freed between
    whole parameters leave holes: ZeRO-3 with offload was seen to need 4.2 GB for the 2.5 GB that it held.
    Each new tensor then pays for its pages, so a step takes longer.
    """
    _mallopt({M_MMAP_THRESHOLD: 2**20})


def allocate_as_usual() -> None:
    """Undo both: bounds as in a fresh process, and what is kept is given back now. Does nothing where neither was."""
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
