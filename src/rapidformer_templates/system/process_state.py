"""Restores the state of a process after a training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rapidformer_templates.system.host_memory import use_default_allocator
from rapidformer_templates.system.random_state import capture, restore

ENVIRONMENT = ("TOKENIZERS_PARALLELISM",)
"""Environment variables that a training sets."""


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
