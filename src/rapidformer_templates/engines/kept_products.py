"""Products that a recomputation keeps: their memory is theirs until the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_KEPT = ContextVar("products are kept", default=False)


@contextmanager
def keeping_products() -> Iterator[None]:
    """Around a forward whose products with weights are read again in its backward."""
    before = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(before)


def products_are_kept() -> bool:
    """Whether what a layer has just computed must be left as it is."""
    return _KEPT.get()
