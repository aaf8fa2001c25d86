"""Imports DeepSpeed once, so that its own check of a file needs no child process."""

from __future__ import annotations

import contextlib

import pytest


@pytest.fixture(autouse=True, scope="package")
def in_this_process() -> None:
    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401
