"""Host memory for training on a CPU: freed activations and gradients are kept for the next step."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Have glibc's allocator keep what is freed instead of giving it back to the system.

    By default every large tensor is a mapping of its own, and each step pays for its pages again;
    half of the page faults of a step are saved by this, at the cost of a process that stays as large
    as it once was. See mallopt(3); other allocators and systems are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
