"""Tensors without data that transformers treats as real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import import_utils

from rapidformer_templates.system.replaced_functions import patch_function

_as_if_real: ContextVar[bool] = ContextVar("fake tensors taken for real ones", default=False)


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Enable tensors without data. transformers takes the same path through a model as with data."""
    patch_function(import_utils, "is_fake_tensor", lambda check, tensor: not _as_if_real.get() and check(tensor))
    token = _as_if_real.set(True)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        _as_if_real.reset(token)
